"""A rollout's engine alone, until it is killed: `python -m tests.vllm.opens`."""

from testbed.waiting import let_pass


def main() -> None:
    from tests.vllm.test_vllm_process import open_process

    engine = open_process()
    print("open", flush=True)
    let_pass(600)
    print(engine.version)


if __name__ == "__main__":
    main()
