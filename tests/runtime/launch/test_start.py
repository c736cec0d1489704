"""What a first start on this host looks at before it makes anything."""

from pathlib import Path

import pytest

from configs.load import load_run
from runtime.errors import ConfigError
from runtime.launch.start import start_run


def test_a_first_start_names_the_inputs_it_lacks(tmp_path: Path) -> None:
    root = tmp_path / "run"
    sets = [f'output.root="{root}"', f'teacher.path="{tmp_path}/nowhere"']
    loaded = load_run("configs/presets/laptop-opd.toml", sets)
    with pytest.raises(ConfigError, match=r"teacher\.path: .*nowhere does not exist; .*validate"):
        start_run(loaded)
    assert not root.exists()
