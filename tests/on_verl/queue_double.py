"""verl's queue and agent loop workers in memory, as seen by the replay buffers of verl and of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from agent_rl.backends.verl.worker.agent_loop import outputs_of
from agent_rl.core.episode import Episode


class Queue:
    """Implements the used part of `transfer_queue`: rows by partition and key, with tags."""

    def __init__(self) -> None:
        self.tags: dict[str, dict[str, dict[str, object]]] = {"train": {}, "val": {}}
        self.rows: dict[str, dict[str, object]] = {}

    def kv_list(self) -> dict[str, dict[str, dict[str, object]]]:
        return self.tags

    def kv_batch_get(self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> TensorDict:
        assert all(key in self.tags[partition_id] for key in keys), "asked for what was cleared"
        return list_of_dict_to_tensordict([{name: self.rows[key][name] for name in select_fields} for key in keys])

    def kv_clear(self, keys: Sequence[str], partition_id: str) -> None:
        for key in keys:
            del self.tags[partition_id][key]
            self.rows.pop(key, None)

    def finish(self, prompt: str, sessions: Sequence[Episode], step: int, partition: str = "train") -> None:
        """Do what an agent loop's worker does when all sessions of a prompt have ended."""
        tag = {"global_steps": step}
        for number, episode in enumerate(sessions):
            for index, output in enumerate(outputs_of(episode)):
                key = f"{prompt}_{number}_{index}"
                self.rows[key], self.tags[partition][key] = output.as_dict(), {"seq_len": index, **tag}
        self.tags[partition][prompt] = {"is_prompt": True, "status": "finished", **tag}


class Rollout:
    """Runs submitted prompts at once: group `i` of training holds the episodes of `play(i)`."""

    def __init__(self, queue: Queue, play: Callable[[int], Sequence[Episode]]) -> None:
        self.queue, self.play, self.step = queue, play, 1
        self.submitted: list[int] = []
        """How many prompts were submitted, each time."""

    def refill(self, n: int) -> None:
        first = sum(self.submitted)
        self.submitted.append(n)
        for index in reversed(range(first, first + n)):  # the last prompt is done first
            self.queue.finish(f"prompt{index}", self.play(index), self.step)


def prompts_of(batch: KVBatchMeta) -> list[str]:
    """The prompts of a batch's rows, each once, in order."""
    return list(dict.fromkeys(key.split("_")[0] for key in batch.keys))
