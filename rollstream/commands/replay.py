"""`rollstream replay`: a run's steps trained again (`--from-step`), its records published again
(`--to`), or a model trained on trajectories alone (`--offline`); docs/replay.md.

Exit codes: 0 done and equal, 1 some step differs or something is gone, 2 the wish means nothing.
"""

import argparse

from streams.errors import ConfigurationError

FORMS = {
    "from_step": ("to_step", "out", "overrides", "where"),
    "to": ("topic", "where", "name"),
    "offline": ("out", "overrides", "where", "name"),
}
"""What says which form is meant, and what belongs to it."""


def main(arguments: argparse.Namespace) -> int:
    """One of the three."""
    form = _form(arguments)
    if form == "to":
        from rollstream.commands.replay_to import main as publish_again

        return publish_again(arguments)
    if form == "offline":
        from rollstream.commands.replay_offline import main as train_offline

        return train_offline(arguments)
    from rollstream.commands.replay_steps import main as train_again

    return train_again(arguments)


def _form(arguments: argparse.Namespace) -> str:
    """Which is meant; `ConfigurationError` if none, several, or with what belongs to another."""
    given = [form for form in FORMS if getattr(arguments, form) is not None]
    if len(given) != 1:
        raise ConfigurationError(
            "say what to do, one of: --from-step N --out DIR (train steps again), --to BUS "
            "(publish records again), --offline CONFIG --out DIR (train on trajectories alone)"
        )
    (form,) = given
    for other in {name for names in FORMS.values() for name in names} - {*FORMS[form]}:
        if getattr(arguments, other):
            raise ConfigurationError(
                f"--{_option(other)} means nothing with --{_option(form)}; leave it out"
            )
    if form != "to" and not arguments.out:
        raise ConfigurationError("--out DIR says where to write: a new or empty folder")
    if form != "offline" and len(arguments.runs) > 1:
        raise ConfigurationError(
            f"give one run, got {len(arguments.runs)}; only --offline takes several"
        )
    return form


def _option(name: str) -> str:
    return {"overrides": "set"}.get(name, name.replace("_", "-"))
