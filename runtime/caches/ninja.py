"""Kernels that ninja built, and that came out of an archive: why they are not built again.

Ninja goes by times to the nanosecond, and by commands with whole paths in them; neither is the same
in another folder. So what was restored is marked with digests of its build file and libraries, and
a ``ninja`` that comes first on a server's ``PATH`` has nothing to do where they still hold: the
server has asked for just what was built, by the same versions for the same machine
(``caches.key``). Any other build file, any other folder, and whoever asks for more than all that a
build file makes (a target, a tool, a version), goes to the real ninja.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from runtime.checkpoints.files import digest

BUILD_FILE = "build.ninja"
MARK = ".restored"
_GUARD = f"""\
#!/bin/sh
folder=. file={BUILD_FILE} value= is_known=1
for word; do
  case $value in
    C) folder=$word value= ; continue ;;
    f) file=$word value= ; continue ;;
    other) value= ; continue ;;
  esac
  case $word in
    -C) value=C ;;
    -f) value=f ;;
    -[jkl]) value=other ;;
    -[jkl][0-9]* | -v | --verbose | --quiet) ;;
    *) is_known= ;;
  esac
done
case $file in /*) ;; *) file=$folder/$file ;; esac
build=${{file%/*}}
if [ "$is_known" ] && [ "${{file##*/}}" = {BUILD_FILE} ] && [ -f "$build/{MARK}" ] &&
  (CDPATH= cd -- "$build" && sha256sum --status -c {MARK}) 2>/dev/null
then
  echo "ninja: no work to do."
  exit 0
fi
rest=
IFS=:
for place in $PATH; do
  [ "$place" = "${{0%/*}}" ] || rest=${{rest:+$rest:}}$place
done
unset IFS
PATH=$rest
exec ninja "$@"
"""


def mark(builds: Iterable[Path]) -> int:
    """Mark the folders of these build files; returns how many.

    A folder whose build left no library is not marked.
    """
    num_marked = 0
    for build in builds:
        built = sorted(build.parent.glob("*.so"))
        if built:
            lines = [f"{digest(path)}  {path.name}\n" for path in (build, *built)]
            (build.parent / MARK).write_text("".join(lines))
            num_marked += 1
    return num_marked


def write_guard(folder: Path) -> None:
    """Write the ``ninja`` that knows the mark; ``folder`` is to come first on the ``PATH``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ninja").write_text(_GUARD)
    (folder / "ninja").chmod(0o755)
