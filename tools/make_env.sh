#!/usr/bin/env bash
# Makes .venv with this package (editable) and everything that is tested with it, from PyPI.
#
# Nothing happens when .venv is up to date. A .venv that was interrupted while it was made is made
# again; one that was interrupted while it was updated gets its packages reinstalled; one that was
# made by hand is kept and completed. Only relative paths: the folder may have a space in its name.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
READY=$VENV/.ready           # holds the fingerprint of what was installed
UNFINISHED=$VENV/.unfinished # holds "making" or "updating" while that is under way

# The folder is part of it: a moved checkout's venv points at the old place.
fingerprint=$({ cat setup.py constraints.txt && pwd; } | cksum)
if [ "$(cat "$READY" 2>/dev/null)" = "$fingerprint" ] && $VENV/bin/python -c '' 2>/dev/null; then
    exit 0
fi

reinstall=()
case "$(cat "$UNFINISHED" 2>/dev/null || true)" in
making) rm -rf "$VENV" ;;
updating) reinstall=(--force-reinstall) ;;
esac
if ! $VENV/bin/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
    python=$(bash tools/find_python.sh)
    if [ -e "$VENV" ]; then
        echo "$VENV does not hold a Python >= 3.12 that runs with pip: making it again"
        rm -rf "$VENV"
    fi
    echo "Making $VENV with $python"
    mkdir "$VENV"
    echo making >"$UNFINISHED"
    "$python" -m venv "$VENV"
elif [ ! -e "$UNFINISHED" ]; then
    echo updating >"$UNFINISHED"
fi
rm -f "$READY"

echo "Installing packages (several GB where none is cached; torch is the largest)"
verbosity=()
[ -t 1 ] || verbosity=(-qq) # progress bars are for people
$VENV/bin/python -m pip install "${verbosity[@]}" --disable-pip-version-check "${reinstall[@]}" \
    --constraint constraints.txt --editable '.[test,report]'
if ! report=$($VENV/bin/python -c 'import megatron_ft.patches, megatron.core, mpi4py.MPI' 2>&1); then
    printf '%s\n' "$report" "The packages are installed but cannot be imported." >&2
    exit 1
fi
printf '%s\n' "$fingerprint" >"$READY"
rm -f "$UNFINISHED"
echo "$VENV is ready"
