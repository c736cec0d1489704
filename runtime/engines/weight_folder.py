"""A folder of weights, looked at before a server is told to load it.

SGLang reads the files while it already writes into the model, and reads them again to take back
what it did: a torn file fails twice, and its whole server ends. Only headers are read here, and
what they say is held against the files' sizes.

Standard library only: SGLang's own process looks at the folder in the same way, for on another host
it may see less of it than we do.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import cast

from runtime.errors import PartialWrite
from runtime.safetensors_header import tensors_of_file

_INDEX = "model.safetensors.index.json"


def check_folder(folder: str | Path, names: Collection[str] | None = None) -> None:
    """Refuse a folder that is not whole.

    Args:
        folder: HF folder with one safetensors file, or several and their index. Files that an
            index does not name are not looked at: no engine reads them.
        names: the weights that must be there, and no others; None: nobody said.

    Raises:
        PartialWrite: if it is no folder or holds no weights; a header is damaged; a file is shorter
            or longer than its header says; index and files differ; a weight is there twice; or the
            weights are not those of ``names``.
    """
    path = Path(folder)
    try:
        found = _found(path)
    except (OSError, ValueError, RecursionError) as error:
        raise PartialWrite(f"{path}: {error}", path=str(path)) from error
    if not found:
        raise PartialWrite(f"{path} holds no weights", path=str(path))
    if names is not None and (differ := found ^ set(names)):
        raise PartialWrite(
            f"{path} holds {len(found)} weights where {len(set(names))} were written; "
            f"{len(differ)} differ, among them {sorted(differ)[:3]}",
            path=str(path),
        )


def _found(path: Path) -> set[str]:
    """Names of all weights; ValueError where the files do not agree."""
    found: set[str] = set()
    for file, indexed in _files(path).items():
        try:
            names = {tensor.name for tensor in tensors_of_file(path / file)}
        except (OSError, ValueError) as error:
            raise ValueError(f"{file}: {error}") from error
        if indexed is not None and names != indexed:
            raise ValueError(f"{file} holds others than {_INDEX} says: {_some(names ^ indexed)}")
        if twice := found & names:
            raise ValueError(f"{file} holds again what another file does: {_some(twice)}")
        found |= names
    return found


def _files(path: Path) -> Mapping[str, set[str] | None]:
    """Files that an engine would read, with the weights that the index promises for each."""
    index = path / _INDEX
    if not index.exists():
        return {file.name: None for file in sorted(path.glob("*.safetensors"))}
    held = cast(object, json.loads(index.read_bytes()))
    weights = cast(dict[str, object], held).get("weight_map") if isinstance(held, dict) else None
    if not isinstance(weights, dict):
        raise ValueError(f"{_INDEX} has no weight_map")
    files: dict[str, set[str]] = {}
    for name, file in cast(dict[str, object], weights).items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{_INDEX} names {file!r:.80}, which is no file of the folder")
        files.setdefault(file, set()).add(name)
    return files


def _some(names: set[str]) -> list[str]:
    return sorted(names)[:3]
