"""Runner: the Ray actor that drives a run, as verl's own does, with our trainer in place of verl's."""

from __future__ import annotations

from pathlib import Path

import ray
from omegaconf import DictConfig, OmegaConf

from agent_rl.backends.verl.driver.watchdog import Watchdog, end_with, stop_episodes, watched


@ray.remote
class Runner:
    """Implements what `verl.trainer.main_ppo.run_ppo` asks of a task runner."""

    def run(self, config: DictConfig) -> None:
        """Train to the end.

        Raises:
            ConfigError: if the config asks for what can't be done.
        """
        import transfer_queue as tq
        from verl.trainer.ppo.v1 import AgentLoopManagerTQ
        from verl.utils.logging_utils import configure_verl_logging

        from agent_rl.backends.verl.driver.trainer import TRAINERS

        configure_verl_logging()
        config.transfer_queue.enable = True
        OmegaConf.resolve(config)
        tq.init(config.transfer_queue)
        try:
            trainer = TRAINERS[config.trainer.v1.trainer_mode](config=config)
            trainer.init()
            manager = AgentLoopManagerTQ.create(
                config=config,
                llm_client=trainer.get_llm_client(),
                teacher_client=trainer.get_teacher_client(),
                reward_loop_worker_handles=trainer.get_reward_handles(),
            )
            folder = Path(config.data.agent_rl.episodes).parent
            with Watchdog(watched(trainer, manager), end_with(folder)):
                try:
                    trainer.fit(manager)
                finally:
                    stop_episodes(manager)
            trainer.logger.finish(exit_code=0)
        finally:
            tq.close()
