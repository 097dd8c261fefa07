"""Trains on Catch for a moment, then plays with the agent.

.venv/bin/python examples/train_and_play.py
"""

import apexrl

if __name__ == "__main__":
    run = apexrl.train("Catch-v0", total_frames=60_000, tensorboard=False)
    for row in run.evaluations:
        print(f"{row.frames:8,} frames: mean return {row.mean:.2f}")

    agent = apexrl.load(run.directory)
    env = agent.make_environment()
    for game in range(5):
        observation, _ = env.reset(seed=game)
        agent.reset()
        over, total = False, 0.0
        while not over:
            observation, reward, terminated, truncated, _ = env.step(agent.act(observation))
            over, total = terminated or truncated, total + reward
        print(f"game {game}: {total:+.0f}")
