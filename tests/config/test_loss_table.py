"""`[trainer.loss]`: a file may set a loss and the loss's own settings as a table. A run records the
same as with flat settings, and what does not belong there is refused by file and key.
"""

import json
from pathlib import Path

import pytest

from rollstream.consumers.objectives.losses.kinds import loss_kinds
from rollstream.errors import ConfigurationError
from rollstream.run.config.config import fingerprint, flat_settings, load, load_layers
from rollstream.run.config.recorded_form import FIRST_RELEASE_SETTINGS
from rollstream.run.config.run_folder import RunFolder, write_configuration
from rollstream.run.config.settings import Configuration

TABLE = """
[trainer]
aggregate = "sequence"

[trainer.loss]
kind = "ppo_clip"
clip_low = 0.1
clip_high = 0.3
"""
FLAT = """
[trainer]
aggregate = "sequence"
loss = "ppo_clip"
clip_low = 0.1
clip_high = 0.3
"""
ORIGIN = "run.toml [trainer.loss]"


def loaded(folder: Path, text: str, *overrides: str, **variables: str) -> Configuration:
    file = folder / "run.toml"
    file.write_text(text, encoding="utf-8")
    return load(file, overrides, variables)


def refused(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigurationError) as error:
        loaded(folder, text, *overrides)
    return str(error.value)


def test_a_table_is_another_writing_of_the_flat_settings(tmp_path: Path) -> None:
    table, flat = loaded(tmp_path, TABLE), loaded(tmp_path, FLAT)
    assert table == flat
    assert fingerprint(table) == fingerprint(flat)
    assert (table.trainer.loss, table.trainer.clip_low) == ("ppo_clip", 0.1)


def test_a_json_file_may_have_the_table(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    loss = {"kind": "ppo_clip", "clip_low": 0.1, "clip_high": 0.3}
    file.write_text(json.dumps({"trainer": {"aggregate": "sequence", "loss": loss}}))
    assert load(file, (), {}) == loaded(tmp_path, FLAT)


def test_a_run_records_it_flat_so_that_an_earlier_release_reads_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    write_configuration(folder, loaded(tmp_path, TABLE, f"folder={folder.path}"))
    recorded = json.loads(folder.configuration.read_text(encoding="utf-8"))["trainer"]
    assert (recorded["loss"], recorded["clip_low"]) == ("ppo_clip", 0.1)
    assert {f"trainer.{key}" for key in recorded} <= FIRST_RELEASE_SETTINGS
    assert flat_settings(load(folder.configuration))["trainer.clip_high"] == 0.3


def test_each_setting_names_the_table_as_its_origin(tmp_path: Path) -> None:
    loaded(tmp_path, TABLE)
    origins = load_layers(tmp_path / "run.toml", ("trainer.clip_high=0.4",), {}).origins
    assert (origins["trainer.loss"], origins["trainer.clip_low"]) == (ORIGIN, ORIGIN)
    assert (origins["trainer.aggregate"], origins["trainer.clip_high"]) == ("run.toml", "--set")
    wrong = refused(tmp_path, TABLE.replace("0.1", "-1"))
    assert wrong == f"clip_low must be ≥ 0, got -1 (trainer.clip_low in {ORIGIN})"


@pytest.mark.parametrize("override", ["trainer.loss=dppo", "trainer.loss.kind=dppo"])
def test_the_short_forms_win_over_a_file(tmp_path: Path, override: str) -> None:
    assert loaded(tmp_path, TABLE, override).trainer.loss == "dppo"


@pytest.mark.parametrize("name", ["CLIP_LOW", "LOSS__CLIP_LOW"])
def test_a_variable_has_either_form(tmp_path: Path, name: str) -> None:
    variables = {f"ROLLSTREAM_TRAINER__{name}": ".05"}
    assert loaded(tmp_path, TABLE, **variables).trainer.clip_low == 0.05
    overridden = loaded(tmp_path, TABLE, "trainer.loss.clip_low=.02", **variables)
    assert overridden.trainer.clip_low == 0.02


def test_a_preset_ranks_against_a_table_as_against_flat_settings(tmp_path: Path) -> None:
    """In its own file the table wins; a preset of a higher source decides."""
    trainer = loaded(tmp_path, TABLE.replace("[trainer]", '[trainer]\npreset = "gspo"')).trainer
    assert (trainer.ratio, trainer.clip_high) == ("sequence", 0.3)
    assert loaded(tmp_path, TABLE, "trainer.preset=gspo").trainer.clip_high == 4e-4


def test_an_own_loss_may_read_the_settings_of_any(tmp_path: Path) -> None:
    text = '[trainer.loss]\nkind = "mine:loss"\nclip_low = 0.1\nratio_max = 3.0\n'
    trainer = loaded(tmp_path, text).trainer
    assert (trainer.loss, trainer.clip_low, trainer.ratio_max) == ("mine:loss", 0.1, 3.0)


FOREIGN = [
    (kind, key, owner)
    for kind in loss_kinds()
    for owner, other in loss_kinds().items()
    for key in sorted(other.keys - loss_kinds()[kind].keys)
]


@pytest.mark.parametrize(("kind", "key", "owner"), FOREIGN)
def test_a_setting_of_another_loss_is_refused(
    tmp_path: Path, kind: str, key: str, owner: str
) -> None:
    text = refused(tmp_path, f'[trainer.loss]\nkind = "{kind}"\n{key} = 1.0\n')
    assert text.startswith(f'run.toml: trainer.loss.{key} belongs to kind = "{owner}"')
    assert all(own in text for own in loss_kinds()[kind].keys)
    assert "delete it, or move it to [trainer]" in text


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("clip_dual = 2.0", ["lacks its kind", 'add kind = "ppo_clip", or']),
        ("", ["lacks its kind", 'kind = "dppo" or kind = "ppo_clip"']),
        ("kind = 3", ["trainer.loss.kind must be text, got 3"]),
        ('kind = "ppo_clp"', ["must be one of", "did you mean 'ppo_clip'?", "got 'ppo_clp'"]),
        ('kind = "gspo"', ["gspo is a preset", 'trainer.preset = "gspo"']),
        ('kind = "dppo"\naggregate = "token"', ["aggregate belongs to no loss", "[trainer]"]),
        ('kind = "dppo"\ndivergence_mx = 1', ["divergence_mx", "nearest known: trainer.diver"]),
        ('kind = "ppo_clip"\nepsilon = 1', ["here it is trainer.clip_low"]),
        ('kind = "dppo"\n[trainer]\nloss = "dppo"', ["no valid toml", "keep one of both"]),
        ('kind = "dppo"\ndivergence_max = 1\n[trainer]\ndivergence_max = 1', ["are one setting"]),
    ],
)
def test_what_cannot_stand_in_the_table_is_refused_with_what_to_do(
    tmp_path: Path, lines: str, words: list[str]
) -> None:
    text = refused(tmp_path, f"[trainer.loss]\n{lines}\n")
    assert "run.toml" in text
    assert all(word in text for word in words), text


def test_all_lines_that_are_wrong_are_named_at_once(tmp_path: Path) -> None:
    wrong = '[trainer.loss]\nkind = "dppo"\nclip_low = 1\nlr = 1\n'
    lines = refused(tmp_path, wrong).splitlines()
    assert ["clip_low" in lines[0], "lr belongs to no loss" in lines[1]] == [True, True]


def test_the_command_line_names_a_setting_that_belongs_to_no_loss(tmp_path: Path) -> None:
    assert refused(tmp_path, TABLE, "trainer.loss.lr=1") == (
        "trainer.loss.lr in --set: lr belongs to no loss; set trainer.lr"
    )


@pytest.mark.parametrize("kind", loss_kinds())
@pytest.mark.parametrize(
    ("setting", "takes"),
    [('ratio = "none"', "takes_no_ratio"), ('proximal = "every 1"', "takes_proximal")],
)
def test_parts_that_cannot_work_with_a_loss_are_refused(
    tmp_path: Path, kind: str, setting: str, takes: str
) -> None:
    text = f'[trainer]\n{setting}\n[trainer.loss]\nkind = "{kind}"\n'
    if getattr(loss_kinds()[kind].settings, takes):
        assert loaded(tmp_path, text).trainer.loss == kind
    else:
        key = setting.partition(" ")[0]
        assert f"(trainer.{key} in run.toml)" in refused(tmp_path, text)
