"""Searches a learning rate and a batch size for CartPole with Optuna, which ends bad runs early.

.venv/bin/python -m pip install optuna
.venv/bin/python examples/optuna_search.py 20
"""

import itertools
import sys

import optuna

import apexrl


def objective(trial: optuna.Trial) -> float:
    """Trains once; returns the last evaluation's mean return."""
    steps, rate = itertools.count(), trial.suggest_float("learning_rate", 1e-4, 3e-3, log=True)

    def on_evaluation(evaluation):
        trial.report(evaluation.mean, next(steps))
        return trial.should_prune()  # True ends the run

    run = apexrl.train(
        "CartPole-v1",
        total_frames=60_000,
        learning_rate=f"{rate}:0",  # it falls to 0 until the run ends
        batch_size=trial.suggest_categorical("batch_size", [32, 64, 128]),
        evaluation_period_seconds=5,
        tensorboard=False,
        on_evaluation=on_evaluation,
    )
    if trial.should_prune():
        raise optuna.TrialPruned
    return run.evaluations[-1].mean


if __name__ == "__main__":
    study = optuna.create_study(direction="maximize")
    study.optimize(objective, n_trials=int(sys.argv[1]))
    print(study.best_params, study.best_value)
