"""`rollstream replay`: repeats a run's steps (`--from-step`), copies its records (`--to`), trains
offline (`--offline`), or scores its tokens (`--token-scores`); docs/reference/replay.md. Exit code
1: a step differs or data is missing.
"""

import argparse

from rollstream.errors import ConfigurationError
from rollstream.run.cli.arguments import CommandParser

# The option that selects a kind of replay → the options that this kind permits.
FORMS = {
    "from_step": ("to_step", "out", "overrides", "where"),
    "to": ("topic", "where", "name"),
    "offline": ("out", "overrides", "where", "name"),
    "token_scores": ("where", "name"),
}


def add_arguments(command: CommandParser) -> None:
    command.add_examples(
        "runs/quickstart-0 --from-step 58 --out runs/again",
        "runs/quickstart-0 --from-step 30 --to-step 50 --set trainer.lr=1e-4 --out runs/slower",
        "runs/quickstart-0 --from-step 30 --where 'tokens<100' --out runs/short --json",
        "runs/quickstart-0 --to sqlite:runs/copy",
        "runs/quickstart-0 --to sqlite:runs/good --where 'reward>=1' --where 'step>30'",
        "runs/quickstart-0 --offline runs/quickstart-0/config.json --set trainer.steps=3"
        " --out runs/offline",
        "runs/quickstart-0 --token-scores --where step=58",
    )
    command.add_runs(
        "run, which is only read; with --to also an archive (folder or store URL); with --offline "
        "one or more of both, and .jsonl files; default: newest run"
    )
    _add_kinds(command)
    command.add_argument(
        "--out", metavar="DIR", help="a new folder, or that of the same replay, to resume it"
    )
    command.add_archive_run()
    command.add_json()


def _add_kinds(command: CommandParser) -> None:
    command.add_argument("--from-step", metavar="N", type=int, help="repeat the steps after step N")
    command.add_argument(
        "--to-step", metavar="M", type=int, help="last step to repeat (default: last recorded)"
    )
    command.add_argument(
        "--to", metavar="BUS", help="copy records to another bus: sqlite:FOLDER or kafka://…"
    )
    command.add_argument(
        "--topic",
        metavar="TOPIC",
        action="append",
        help="topic to copy with --to (default: all archived ones)",
    )
    command.add_argument(
        "--offline", metavar="CONFIG", help="train on the trajectories under these settings"
    )
    command.add_argument(
        "--token-scores",
        action="store_true",
        default=None,
        help="compute the trainer's log-probability and the entropy of each generated token, for "
        "`explore` and `inspect --logprobs`; kept in the run's folder",
    )
    command.add_overrides("experiment: another loss, learning rate, lag limit … after step N")
    command.add_conditions(
        "only trajectories whose field (task, reward, tokens, step, lag, time, …) matches"
    )


def main(arguments: argparse.Namespace) -> int:
    form = _form(arguments)
    if form == "to":
        from rollstream.run.cli.change.steps import publish

        return publish(arguments)
    if form == "offline":
        from rollstream.run.cli.change.offline import main as train_offline

        return train_offline(arguments)
    if form == "token_scores":
        from rollstream.run.cli.change.token_scores import main as score_tokens

        return score_tokens(arguments)
    from rollstream.run.cli.change.steps import main as train_again

    return train_again(arguments)


def _form(arguments: argparse.Namespace) -> str:
    forms = [form for form in FORMS if getattr(arguments, form) is not None]
    if len(forms) != 1:
        raise ConfigurationError(
            "select one of: --from-step N --out DIR (repeat training steps), --to BUS (copy "
            "records), --offline CONFIG --out DIR (train on trajectories), --token-scores (score "
            "tokens again)"
        )
    (form,) = forms
    for other in {name for names in FORMS.values() for name in names} - {*FORMS[form]}:
        if getattr(arguments, other):
            raise ConfigurationError(
                f"--{_option(other)} has no meaning with --{_option(form)}; leave it out"
            )
    if "out" in FORMS[form] and not arguments.out:
        raise ConfigurationError("--out DIR is missing: give a new or empty folder")
    if form != "offline" and len(arguments.runs) > 1:
        raise ConfigurationError(
            f"give one run, got {len(arguments.runs)}; only --offline takes several"
        )
    return form


def _option(name: str) -> str:
    return {"overrides": "set"}.get(name, name.replace("_", "-"))
