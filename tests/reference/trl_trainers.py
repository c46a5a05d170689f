"""TRL's trainers without models: only the code that computes losses, advantages and weights is run."""

from collections import defaultdict
from types import SimpleNamespace

import torch


def trainer(cls, **settings):
    """Return a trainer without a model, for its computations only."""
    made = object.__new__(cls)
    accelerator = SimpleNamespace(
        num_processes=1, process_index=0, device=torch.device("cpu"), gather=lambda x: x, reduce=lambda x, reduction: x
    )
    accelerator.gather_for_metrics = accelerator.gather
    vars(made).update(
        accelerator=accelerator,
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        aux_loss_enabled=False,
        beta=0.0,
        _metrics={"train": defaultdict(list)},
        use_vllm=False,
        vllm_importance_sampling_correction=False,
    )
    vars(made).update(settings)
    return made


def scored(cls, rewards, mask, old, mu, **settings):
    """Return a trainer's advantages and weights for rewards `[E, K]` of groups of 4 and their rows' policies."""
    prompts = [{"prompt": ""} for _ in rewards]
    tokens = [[1] * mask.shape[1] for _ in rewards]
    generated = [[0] for _ in rewards], tokens, mask.long().tolist(), tokens, mu.tolist(), {}, None, None
    knobs = {"scale_rewards": "group", "multi_objective_aggregation": "sum_then_normalize", "num_iterations": 1}
    if cls.__name__ == "RLOOTrainer":
        generated, knobs = generated[:2] + generated[3:4], {"reward_clip_range": None, "normalize_advantages": False}
    names = [f"r{k}" for k in range(rewards.shape[1])]
    arguments = {"per_device_train_batch_size": 8, "gradient_checkpointing_kwargs": None}
    arguments |= {"steps_per_generation": 1, "gradient_accumulation_steps": 1}
    absent = ("environment_factories", "environments", "tools", "pad_to_multiple_of")
    knobs |= dict.fromkeys(absent) | dict.fromkeys(("log_multimodal", "mask_truncated_completions"), False)
    knobs |= {"reward_weights": torch.ones(len(names), dtype=torch.float64)}
    made = trainer(
        cls,
        args=SimpleNamespace(**arguments),
        reward_funcs=names,
        reward_func_names=names,
        num_generations=4,
        _generate=lambda _: generated,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        _get_per_token_logps_and_entropies=lambda *_, **__: (old, None, None),
        _calculate_rewards=lambda *_: rewards,
        _logs=defaultdict(list) | {"rewards": defaultdict(list)},
        _pending_extra_logs={},
        _pending_metrics={},
        **(knobs | settings),
    )
    return made._generate_and_score_completions(prompts)
