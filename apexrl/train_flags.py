"""The flags of `apexrl.train` with their types, of all algorithms. Written by `python -m deploy flags`."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class TrainFlags(TypedDict, total=False):
    """Any of them may be left out; `apexrl train --help` says what they do."""

    action_gradient_clip: float
    action_mask: str
    activation: Literal["relu", "tanh"]
    actor_device: str
    actor_port: int
    agent: str
    anneal_updates: int
    at: int
    atoms: int
    batch_port: int
    batch_size: int
    bind_host: str
    c_bar: float
    callback: str | Sequence[str]
    candidates: int
    capacity: int
    channels: Sequence[int]
    checkpoint: str
    checkpoint_period_seconds: float
    checkpoint_period_updates: int
    clip_rewards: Literal["auto", "yes", "no"]
    compression_level: int
    critic_norm: Literal["none", "layer", "batch"]
    critics: int
    device: str
    distance: Literal["kl", "l2", "cosine"]
    entropy_cost: float | str
    entropy_target: float | str
    env_kwargs: str | Mapping[str, Any]
    environment_groups: int
    environments_per_worker: int
    episodes: int
    epsilon_base: float
    epsilon_exponent: float
    evaluation_epsilon: float
    evaluation_period_seconds: float
    evaluation_period_updates: int
    evaluator: bool
    eviction_period_batches: int
    film_every: int
    final_evaluation_seconds: float
    fire_at_reset: bool
    first_deviation: float
    first_temperature: float
    fork: str
    frame_stack: int
    from_journal: str
    from_scratch: bool
    gamma: float
    grayscale: bool
    guest: str
    hidden_size: int
    importance_exponent: float
    initial_priorities: Literal["equal", "critic"]
    inputs: str | Sequence[str]
    journal_dir: str
    journal_flush_seconds: float
    journal_snapshot_seconds: float
    keep_checkpoints: int
    keys: str
    layer_norm: bool
    learner_devices: str
    learner_host: str
    learner_threads: int
    learning_rate: float | str
    least_return: float
    life_loss_terminal: bool
    lstm: bool
    lstm_size: int
    max_episode_frames: int
    max_gb: float
    max_gradient_norm: float | str
    max_restarts: int
    max_seconds: float
    max_share: float
    meeting_port: int
    memory_gb: float
    metrics_port: int
    min_size_to_sample: int
    minibatches: int
    mix: str | Sequence[str]
    mix_journal: str
    mlflow: bool
    most_return: float
    munchausen: float
    n_steps: int
    name: str
    network: str
    noise_least: float
    noise_most: float
    noop_max: int
    normalize_observations: bool
    num_learners: int
    num_workers: int
    optimizer: Literal["adam", "rmsprop"]
    optimizer_epsilon: float
    parameter_period_frames: int
    parameter_port: int
    patience_seconds: float
    pg_rho_bar: float
    policy_cloning_cost: float | str
    policy_period_updates: int
    policy_temperature: float
    port_base: int
    prefetch_batches: int
    preset: str
    priority_exponent: float
    publish_megabytes_per_second: float
    publish_period_seconds: float
    publish_period_updates: int
    quantiles: int
    record_dir: str
    reduction: Literal["sum", "mean"]
    repeat_action_probability: float
    replay_host: str
    replay_state: str
    reproducible: bool
    resize: int | Sequence[int]
    resume: str
    reward_transform: Literal["none", "soft-asymmetric"]
    rho_bar: float
    run_dir: str
    samples_per_insert: float
    scale_rewards: bool
    seed: int
    sequence_unrolls: int
    shards: int
    smoke: bool
    step_deadline_seconds: float
    stop_at_return: float
    surrogate_clip: float | str
    table: str
    tables: str | Sequence[str]
    target_noise: float
    target_noise_clip: float
    target_period_updates: int
    target_rate: float
    target_rho_bar: float
    tensorboard: bool
    tensorboard_host: str
    tensorboard_port: int
    torso: Literal["shallow", "deep"]
    total_frames: int
    total_updates: int
    trace_lambda: float
    trust: bool
    trust_region: float
    unroll_starts: int
    value_cloning_cost: float | str
    value_cost: float | str
    value_rescaling: bool
    wandb: bool
    wrapper: str | Sequence[str]
