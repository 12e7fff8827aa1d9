"""`rollstream replay`: repeats a run's training steps (`--from-step`), copies its records (`--to`),
or trains offline on trajectories (`--offline`); docs/reference/replay.md.

Exit codes: 0 done and equal, 1 a step differs or data is missing, 2 the arguments are invalid.
"""

import argparse

from rollstream.errors import ConfigurationError

FORMS = {
    "from_step": ("to_step", "out", "overrides", "where"),
    "to": ("topic", "where", "name"),
    "offline": ("out", "overrides", "where", "name"),
}
"""The option that selects each kind of replay, and the options that it permits."""


def main(arguments: argparse.Namespace) -> int:
    """Run the selected kind of replay."""
    form = _form(arguments)
    if form == "to":
        from rollstream.cli.replay.publish import main as publish_again

        return publish_again(arguments)
    if form == "offline":
        from rollstream.cli.replay.offline import main as train_offline

        return train_offline(arguments)
    from rollstream.cli.replay.steps import main as train_again

    return train_again(arguments)


def _form(arguments: argparse.Namespace) -> str:
    """Returns the selected kind. Raises `ConfigurationError` for none or several, and for options
    of another kind.
    """
    given = [form for form in FORMS if getattr(arguments, form) is not None]
    if len(given) != 1:
        raise ConfigurationError(
            "select one of: --from-step N --out DIR (repeat training steps), --to BUS (copy "
            "records), --offline CONFIG --out DIR (train on trajectories)"
        )
    (form,) = given
    for other in {name for names in FORMS.values() for name in names} - {*FORMS[form]}:
        if getattr(arguments, other):
            raise ConfigurationError(
                f"--{_option(other)} has no meaning with --{_option(form)}; leave it out"
            )
    if form != "to" and not arguments.out:
        raise ConfigurationError("--out DIR is missing: give a new or empty folder")
    if form != "offline" and len(arguments.runs) > 1:
        raise ConfigurationError(
            f"give one run, got {len(arguments.runs)}; only --offline takes several"
        )
    return form


def _option(name: str) -> str:
    return {"overrides": "set"}.get(name, name.replace("_", "-"))
