"""For ``render.py``: the columns of benchmarks whose results are a line each, and the types of tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# what a table's columns show: (heading, path into the result, or into the row)
Columns = list[tuple[str, str]]
# a table's lines: (label, figures)
Rows = list[tuple[str, dict[str, Any]]]
# heading of the first column, function that returns the rows of a result, and their columns
Table = tuple[str, Callable[[dict[str, Any]], Rows], Columns]

# bench -> columns
COLUMNS: dict[str, Columns] = {
    "atari-throughput": [
        ("precision", "precision"),
        ("env steps / CPU s", "env_steps_per_cpu_second"),
        ("x SB3 A2C", "ratio_sb3_a2c"),
        ("of float32 limit", "ratio_limit_float32"),
        ("float32: env steps / CPU s", "by_precision.float32.env_steps_per_cpu_second.median"),
        ("float32: x SB3 A2C", "by_precision.float32.ratio_sb3_a2c.median"),
        ("float32: of limit", "by_precision.float32.ratio_limit_float32"),
        ("SB3 A2C", "sb3_env_steps_per_cpu_second"),
        ("limit float32", "limit_float32"),
        ("limit bfloat16", "limit_bfloat16"),
        ("share with 2 GALA learners", "per_learner_share_with_2_gossiping"),
        ("double buffer on: env steps / s", "double_buffer.env_steps_per_second_on.median"),
        ("off", "double_buffer.env_steps_per_second_off.median"),
    ],
    "control-throughput": [
        ("TD3: updates / CPU s", "td3_updates_per_cpu_second"),
        ("x SB3", "td3_ratio_sb3"),
        ("of limit", "td3_ratio_limit"),
        ("bfloat16: x SB3", "td3_bfloat16_ratio_sb3"),
        ("SAC: updates / CPU s", "sac_updates_per_cpu_second"),
        ("x SB3", "sac_ratio_sb3"),
        ("of limit", "sac_ratio_limit"),
        ("bfloat16: x SB3", "sac_bfloat16_ratio_sb3"),
        ("fastest peer", "fastest_peer"),
        ("x it", "ratio_fastest_peer"),
    ],
    "replay-service": [
        ("draws / CPU s", "draws_per_cpu_second.service.median"),
        ("of a learner's own replay", "draws_per_cpu_second.own.median"),
        ("share of that", "share_of_own"),
        ("samples per insert", "samples_per_insert_held.median"),
        ("kills", "kills"),
        ("inserts lost", "lost_inserts"),
        ("twice", "doubled_inserts"),
        ("draws lost", "lost_draws"),
        ("twice", "doubled_draws"),
    ],
    "vizdoom-throughput": [
        ("A2C: env steps / CPU s", "env_steps_per_cpu_second"),
        ("x Sample Factory", "ratio_sample_factory"),
        ("by wall time", "by_agent.a2c.ratio_sample_factory_wall.median"),
        ("float32: x Sample Factory", "by_agent.a2c float32.ratio_sample_factory.median"),
        ("IMPALA: env steps / CPU s", "by_agent.impala.env_steps_per_cpu_second.median"),
        ("x Sample Factory", "by_agent.impala.ratio_sample_factory.median"),
        ("by wall time", "by_agent.impala.ratio_sample_factory_wall.median"),
        ("float32: x Sample Factory", "by_agent.impala float32.ratio_sample_factory.median"),
    ],
    "resnet-throughput": [
        ("images / CPU s", "images_per_cpu_second"),
        ("x faster DDP loop", "ratio_ddp"),
        ("x DDP, our decoding", "ratios.ddp same"),
        ("x DDP, Pillow", "ratios.ddp pillow"),
        ("x Accelerate, our decoding", "ratio_accelerate"),
        ("loading: x DataLoader, Pillow", "ratio_loader"),
        ("loading: x DataLoader, our decoding", "loading.ratio_same_functions"),
    ],
    "image-loading": [
        ("images / CPU s", "images_per_cpu_second"),
        ("x DataLoader, Pillow", "ratio_pillow"),
        ("x DataLoader, our decoding", "ratio_same_functions"),
        ("by wall time: Pillow", "ratio_pillow_wall"),
        ("our decoding", "ratio_same_functions_wall"),
    ],
    "replicator-scaling": [
        ("step on one core (s)", "step_seconds"),
        ("gloo (bytes / s)", "gloo_bytes_per_second"),
        ("verdict", "verdict"),
    ],
    "resnet-parity": [
        ("first steps with equal losses, float64", "equal_steps"),
        ("plain loop perturbed in the last bit", "equal_steps_perturbed_plain"),
        ("difference over 20 steps, float64", "float64.ours.20"),
        ("perturbed", "float64.perturbed_plain.20"),
        ("accuracy: ours minus plain", "accuracy_difference"),
    ],
    "plan": [
        ("median error", "median_error"),
        ("worst error", "worst_error"),
        ("median of all of three recipes", "median_error_exhaustive"),
        ("worst of these", "worst_error_exhaustive"),
        ("best measured over first choice, minus 1", "choice_over_best"),
    ],
    "spatial": [
        ("largest error, float64", "largest_error_float64"),
        ("layers", "layers"),
        ("memory share of 2 parts", "memory_share_2"),
        ("speed-up of 2 parts", "speedup_2"),
        ("dilated", "speedup_2_dilated"),
        ("ResNet-18", "speedup_2_nets.resnet18"),
        ("U-Net", "speedup_2_nets.unet"),
    ],
    "topics": [
        ("documents / CPU s", "documents_per_second"),
        ("x gensim", "ratio_gensim"),
        ("x scikit-learn", "ratio_sklearn"),
        ("x scikit-learn in float32", "ratio_sklearn_float32"),
        ("perplexity", "perplexity"),
        ("gensim", "perplexity_gensim"),
        ("scikit-learn", "perplexity_sklearn"),
        ("own defaults", "perplexity_defaults"),
        (
            "x faster to the better one's final perplexity",
            "to_the_peers_perplexity.generated.ours.murmurate defaults.times_faster",
        ),
        (
            "DPSVI: CPU s to the sampler's perplexity",
            "dpsvi_and_the_sampler.generated.cpu_seconds_to_the_samplers",
        ),
        ("sampler: CPU s", "dpsvi_and_the_sampler.generated.sampler_cpu_seconds"),
    ],
    "topics-stream": [
        ("documents", "plan.documents"),
        ("words", "plan.vocabulary"),
        ("entries", "entries"),
        ("replicas", "plan.replicas"),
        ("seconds", "wall_seconds"),
        ("seconds of training", "training_seconds"),
        ("perplexity", "perplexity"),
        ("peak resident bytes of a process", "peak_resident_bytes_most"),
    ],
    "cartpole-throughput": [
        ("env steps / CPU s, 16", "env_steps_per_cpu_second"),
        ("x SB3 A2C, 16", "ratio_sb3_a2c"),
        ("env steps / CPU s, 8", "by_simulators.8_simulators.env_steps_per_cpu_second.median"),
        ("x SB3 A2C, 8", "by_simulators.8_simulators.ratio_sb3_a2c.median"),
    ],
    "dqn-throughput": [
        ("float32: env steps / CPU s", "env_steps_per_cpu_second"),
        ("x SB3 DQN", "ratio_sb3_dqn"),
        ("bfloat16", "by_kind.bfloat16.env_steps_per_cpu_second.median"),
        ("x SB3 DQN", "by_kind.bfloat16.ratio_sb3_dqn.median"),
        ("plain as SB3's, float32", "by_kind.uniform float32.env_steps_per_cpu_second.median"),
        ("x SB3 DQN", "by_kind.uniform float32.ratio_sb3_dqn.median"),
        ("plain, bfloat16", "by_kind.uniform bfloat16.env_steps_per_cpu_second.median"),
        ("x SB3 DQN", "by_kind.uniform bfloat16.ratio_sb3_dqn.median"),
        ("D = 2, float32", "by_kind.float32 ahead.env_steps_per_cpu_second.median"),
        ("SB3 DQN", "sb3_env_steps_per_cpu_second"),
        ("SB3 with 1 simulator", "sb3_1_simulator_env_steps_per_cpu_second"),
        ("bfloat16: x SB3 with 1", "by_kind.bfloat16.ratio_sb3_dqn_1_simulator.median"),
    ],
    "strategy-cost": [
        ("GALA, 2 members: copies", "strategies.gala.2_members.copies_when_heard.median"),
        ("4 members", "strategies.gala.4_members.copies_when_heard.median"),
        ("all-reduce, 2", "strategies.all-reduce.2_members.copies.median"),
        ("4", "strategies.all-reduce.4_members.copies.median"),
        ("local SGD (mean), 2", "strategies.local-sgd.2_members.copies_mean.median"),
        ("4", "strategies.local-sgd.4_members.copies_mean.median"),
        ("Hogwild, 2", "strategies.hogwild.2_members.copies.median"),
        ("4", "strategies.hogwild.4_members.copies.median"),
        ("GALA waits (share of time)", "gala_waiting_share"),
    ],
    "all-reduce-vs-ddp": [
        ("ours: updates / s", "ours.updates_per_second.median"),
        ("DDP: updates / s", "ddp.updates_per_second.median"),
        ("ratio", "ratio_updates_per_second"),
        ("ours: CPU s / update", "ours.cpu_seconds_per_update.median"),
        ("DDP", "ddp.cpu_seconds_per_update.median"),
        ("ratio", "ratio_updates_per_cpu_second"),
    ],
}
