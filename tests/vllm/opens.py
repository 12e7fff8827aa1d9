"""A rollout's engine and nothing else, until it is killed: `python opens.py FOLDER …`, folders to
import from.
"""

import sys
import time


def main() -> None:
    sys.path[:0] = sys.argv[1:]
    from test_vllm_process import open_process

    engine = open_process()
    print("open", flush=True)
    time.sleep(600)
    print(engine.version)


if __name__ == "__main__":
    main()
