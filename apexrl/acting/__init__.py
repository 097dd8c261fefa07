"""The actor's and the evaluator's process: environments stepped, unrolls sent, games played for evaluation."""
