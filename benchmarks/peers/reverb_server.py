"""A Reverb server with one prioritized table: `python reverb_server.py --port 52011 [--capacity N] [--lifetime S]`.

It needs dm-reverb with its TensorFlow, which `benchmarks.peers.environment` installs, and imports nothing of apexrl.
It prints one line when it serves, and ends by itself after its lifetime. It holds no data beyond that.
"""

import argparse
import os
import time

TABLE = "transitions"
PRIORITY_EXPONENT = 0.6
WINDOW_FRAMES = 7  # 4 stacked frames, and 3 more up to the observation that an n-step return bootstraps from


def main() -> None:
    """Serves until killed, or until the lifetime is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--capacity", type=int, default=20_000, help="transitions")
    parser.add_argument("--lifetime", type=float, default=600, metavar="SECONDS")
    arguments = parser.parse_args()

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import reverb
    import tensorflow as tf

    signature = {
        "frames": tf.TensorSpec([WINDOW_FRAMES, 84, 84], tf.uint8),
        "numbers": tf.TensorSpec([3], tf.float32),  # action, return, discount
    }
    table = reverb.Table(
        name=TABLE,
        sampler=reverb.selectors.Prioritized(PRIORITY_EXPONENT),
        remover=reverb.selectors.Fifo(),
        max_size=arguments.capacity,
        rate_limiter=reverb.rate_limiters.MinSize(1),
        signature=signature,
    )
    server = reverb.Server([table], port=arguments.port)
    print("ready", flush=True)
    time.sleep(arguments.lifetime)
    server.stop()


if __name__ == "__main__":
    main()
