"""Environment variables and settings of verl with which a run fits on two CPU cores."""

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "verl_cpu.plugin",
    "VERL_ENGINE_DEVICE": "cuda",  # verl's FSDP engine is registered for no other
    "VERL_ENGINE_VENDOR": "nvidia",
    "VERL_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_SGL_KERNEL": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "HYDRA_FULL_ERROR": "1",
}

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SETTINGS = {
    "actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
    "actor_rollout_ref.model.use_remove_padding": False,
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    f"{_ACTOR}.strategy": "fsdp2",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": 16,
    f"{_ACTOR}.fsdp_config.use_torch_compile": False,
    f"{_ACTOR}.fsdp_config.model_dtype": "fp32",
    f"{_ACTOR}.fsdp_config.mixed_precision.param_dtype": "float32",
    f"{_ROLLOUT}.engine_kwargs.vllm.worker_extension_cls": "verl_cpu.worker.CpuWorkerExtension",
    f"{_ROLLOUT}.tensor_model_parallel_size": 1,
    f"{_ROLLOUT}.dtype": "float32",
    f"{_ROLLOUT}.enforce_eager": True,
    f"{_ROLLOUT}.free_cache_engine": False,
    f"{_ROLLOUT}.enable_sleep_mode": False,
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": 16,
    f"{_ROLLOUT}.max_num_seqs": 64,
    # vLLM's CPU sampler can't take a draw back, as it does for a prompt that was cut in two, if requests have seeds
    f"{_ROLLOUT}.max_num_batched_tokens": 8192,
    f"{_ROLLOUT}.enable_chunked_prefill": False,
    f"{_ROLLOUT}.load_format": "auto",
    f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 32,
    f"{_ROLLOUT}.agent.num_workers": 1,
    "reward.num_workers": 1,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "trainer.device": "cpu",
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 1,
    "ray_kwargs.ray_init.num_cpus": 16,
    "ray_kwargs.ray_init.num_gpus": 1,
    "ray_kwargs.ray_init.include_dashboard": False,
}

SEPARATE = {
    f"{_ROLLOUT}.checkpoint_engine.backend": "file",
    f"{_ROLLOUT}.checkpoint_engine.custom_backend_module": "verl_cpu.weights",
    "ray_kwargs.ray_init.num_gpus": 2,
}
"""More of them where rollout has devices of its own."""
FOLDER = f"{_ROLLOUT}.checkpoint_engine.engine_kwargs.file.folder"
"""Where they exchange the weights."""
REFERENCE = {
    "actor_rollout_ref.ref.fsdp_config.use_torch_compile": False,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 16,
}
"""More of them for an algorithm with a reference."""
