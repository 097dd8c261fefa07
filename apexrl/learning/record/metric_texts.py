"""The meaning and the unit of every metric, for TensorBoard and the documentation."""

import fnmatch
from typing import NamedTuple

SINCE = "since the log began, or since a fork or a lost snapshot let its tables begin anew"
CANDIDATES = "candidates of attentive and elite replay among them"


class MetricText(NamedTuple):
    """The meaning of the metrics with a tag."""

    tag: str  # with * for a part that a run names, such as a table
    unit: str
    text: str


TEXTS = tuple(
    MetricText(*row)
    for row in (
        ("evaluation/return_mean", "", "Mean return of an evaluation: whole games, unclipped, hardly any exploration."),
        ("evaluation/return_*", "", "Median, least, greatest return; so_far: mean until now, in status.json only."),
        ("evaluation/game_steps", "steps", "Mean length of an evaluation's games."),
        ("evaluation/frames", "frames", "Frames at those parameters, where evaluations are drawn; in status.json."),
        ("evaluation/games_finished", "games", "Finished games of the evaluation that goes on; in status.json only."),
        ("evaluation/seconds", "s", "Duration of an evaluation."),
        ("evaluation/params_version", "updates", "Update whose parameters were evaluated."),
        ("evaluation/exploration", "", "Exploration in an evaluation's games: epsilon with Ape-X and IMPALA."),
        ("evaluation/games", "", "The games of an evaluation in words: number, returns, exploration, video."),
        ("evaluation/game", "", "The first game of an evaluation, in pictures that move, where it was filmed."),
        ("actor/return_mean", "", "Mean return of training games that ended since the last report, unclipped."),
        ("actor/return_by_exploration/*", "", "The same, by bands of exploration: of epsilon with Ape-X."),
        ("actor/game_steps", "steps", "Mean length of training games."),
        ("actor/frames_per_second", "frames/s", "Environment frames that all actors play."),
        ("actor/agent_steps_per_second", "steps/s", "Agent steps of all actors; a step of Atari is 4 frames."),
        ("actor/agent_steps_total", "steps", "Agent steps of the actors that run now."),
        ("actor/environment_failures_total", "", "Failures of single environments, which the actors made anew."),
        ("actor/params_version", "updates", "Update of the parameters that actors use."),
        ("actor/params_lag_updates", "updates", "Updates that those parameters are behind the learner's."),
        ("actor/dropped_parameters_total", "", "Parameters that actors refused: of another run or not readable."),
        ("actor/sent_bytes_total", "bytes", "Bytes of the unrolls that actors sent."),
        ("actor/time/*", "share", "Share of an actor's time: emulator, inference, assembly, sending, waiting."),
        ("actor/waits_for/*", "share", "Share of the time in which actors wait, by whom they wait for."),
        ("replay/actors", "", "Actor processes that are connected."),
        ("replay/learners", "", "Learners that are connected, guests among them."),
        ("replay/slots", "", "Environment slots that are leased; each has its exploration."),
        ("replay/size", "transitions", "Transitions in the log."),
        ("replay/fill", "share", "The same as a share of the capacity, a soft limit; of --max-gb, if it is nearer."),
        ("replay/age_seconds", "s", "Age of the oldest unroll."),
        ("replay/transitions_inserted", "transitions", f"Transitions that came {SINCE}."),
        ("replay/transitions_sampled", "transitions", f"Transitions that all tables gave {SINCE}, {CANDIDATES}."),
        ("replay/samples_per_insert", "", f"How often a transition is drawn on average, {CANDIDATES}."),
        ("replay/log_bytes", "bytes", "Compressed bytes of the log."),
        ("replay/bytes_per_transition", "bytes", "Compressed bytes of a transition."),
        ("replay/memory_bytes", "bytes", "Resident memory of the server."),
        ("replay/unrolls_not_applied", "unrolls", "Unrolls that learners have not got yet."),
        ("replay/journal_failed", "0 or 1", "Whether the journal cannot be written: actors wait then."),
        ("replay/journal_bytes", "bytes", "Size of the journal."),
        ("replay/journal_unsynced_bytes", "bytes", "Bytes of the journal that a power cut would take."),
        ("replay/journal_unsynced_seconds", "s", "Seconds since the journal was synced."),
        ("replay/waited_seconds_*", "s", "Time that actors or learners waited, by whom they waited for."),
        ("replay/dropped_*", "messages", "Messages that were refused, by reason."),
        ("replay/table/*/inserted", "", "Transitions, or unrolls, that came into a table."),
        ("replay/table/*/sampled", "", "Transitions, or unrolls, that were drawn from a table."),
        ("replay/table/*/samples_per_insert", "", "Draws an insert of a table."),
        ("replay/table/*/missed", "unrolls", "Unrolls that a queue dropped because nobody took them."),
        ("replay/table/*/stale_priorities", "", "Priorities that came too late: newer experience was there."),
        ("replay/table/*/priority_quantile_*", "", "Quantiles of the priorities."),
        ("learner/loss", "", "Loss of the newest update."),
        ("learner/td_error", "", "Mean absolute temporal-difference error of a batch."),
        ("learner/value_mean", "", "Mean value of a batch."),
        ("learner/q_*", "", "Mean and greatest action value of a batch."),
        ("learner/entropy", "nats", "Mean entropy of the policy."),
        ("learner/temperature", "", "Price of the entropy, where it is learned."),
        ("learner/deviation", "", "Mean deviation of a Gaussian policy, in halves of the actions' ranges."),
        ("learner/action_size", "", "Mean size of the target policy's actions, in halves of their ranges."),
        ("learner/importance_ratio", "", "Mean ratio of the policy's and the actor's probability of an action."),
        ("learner/importance_weight", "", "Mean importance weight of a batch."),
        ("learner/probability_*", "share", "Mean probability of an action, over the last 100 updates."),
        ("learner/gradient_norm", "", "Norm of the gradient before it is clipped."),
        ("learner/rejected_share", "share", "Share of a batch's steps that the trust region rejects."),
        ("learner/rejected_share_by_age/*", "share", "The same of replayed steps, by the least age in updates."),
        ("learner/version_lag_*", "updates", "Age of the experience of queues: p50, p95 and max."),
        ("learner/version_lag/*", "updates", "Age of the experience of another table: p50, p95 and max."),
        ("learner/selection/*/journal_share", "share", "Share of a table's newest batch that --mix-journal brought."),
        ("learner/selection/*", "", "Attentive and elite replay: distances and uses of candidates."),
        ("learner/learning_rate", "", "Learning rate, which may change: of --learning-rate."),
        ("learner/scheduled/*", "", "Another number of the updates that changes, by its flag."),
        ("learner/updates_per_second", "updates/s", "Updates of the network."),
        ("learner/updates_total", "updates", "Updates since the run began."),
        ("learner/waits_for/*", "share", "Share of the time in which the learner waits for a batch, by reason."),
        ("learner/skipped_updates_total", "updates", "Updates that were not finite, and left out."),
        ("learner/unusable_transitions_total", "transitions", "Sampled transitions without a finite error."),
        ("learner/undecodable_unrolls_total", "unrolls", "Unrolls that could not be decoded, and were left out."),
        ("learner/disk_faults_total", "", "Writes that the disk refused."),
        ("learner_*/*", "", "The same metric of another learner of the team."),
        ("system/cpu_share", "share", "Share of the machine's cores that are busy."),
        ("system/learner_cores", "cores", "Cores that the learner uses."),
        ("system/actors_cores", "cores", "Cores that all actors use."),
        ("system/evaluator_cores", "cores", "Cores that the evaluator uses."),
        ("system/replay_cores", "cores", "Cores that the replay server uses."),
        ("system/gpu_memory_bytes", "bytes", "Memory of the GPU that the learner holds."),
        ("system/learner_memory_bytes", "bytes", "Resident memory of the learner."),
        ("system/actors_memory_bytes", "bytes", "Resident memory of all actors."),
        ("system/replay_memory_bytes", "bytes", "Resident memory of the replay server."),
        ("system/dropped_reports/*", "", "Dropped reports of other runs or without sense, and numbers not finite."),
    )
)  # fmt: skip


def text_of(tag: str) -> MetricText | None:
    """Returns the meaning of a tag; the first that fits counts."""
    return next((text for text in TEXTS if fnmatch.fnmatchcase(tag, text.tag)), None)
