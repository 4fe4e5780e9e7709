#!/usr/bin/env bash
# Prints the path of a Python that can run this project, or says what to install.
#
# A candidate counts only when it runs: pyenv's shims, for one, may be on PATH and answer with an
# error. PYTHON=/path/to/python, when set, is the only candidate.
set -u

CHECK='
import sys
if not (3, 12) <= sys.version_info < (3, 14):
    sys.exit("is Python %d.%d" % sys.version_info[:2])
try:
    import ensurepip, venv
except ImportError:
    sys.exit("has no venv module")
print(sys._base_executable)  # of a virtual environment: what it was made from
'
rejected=""

# Prints the real path of candidate $1 when it serves; else notes why not.
try() {
    local answer
    if answer=$("$1" -c "$CHECK" 2>&1 </dev/null); then
        printf '%s\n' "$answer"
        exit 0
    fi
    rejected+="  $1: ${answer%%$'\n'*}"$'\n'
}

if [ -n "${PYTHON:-}" ]; then
    try "$PYTHON"
else
    pyenv_root=$(pyenv root 2>/dev/null || echo "$HOME/.pyenv")
    # 3.12 first: it is the version the tests run on.
    for version in 3.12 3.13; do
        while IFS= read -r candidate; do
            try "$candidate"
        done < <(type -aP "python$version")
        for folder in "$pyenv_root/versions/$version".* /usr/local/bin /opt/*/bin \
            /opt/*/*/bin "$HOME"/{miniconda3,anaconda3,miniforge3}{,/envs/*} \
            "${CONDA_PREFIX:-/nonexistent}" "$HOME/.local/share/uv/python/cpython-$version"*; do
            for candidate in "$folder/python$version" "$folder/bin/python$version"; do
                [ -x "$candidate" ] && try "$candidate"
            done
        done
    done
    while IFS= read -r candidate; do
        try "$candidate"
    done < <(type -aP python3 python)
fi

{
    echo "No Python 3.12 or 3.13 with the venv module was found."
    [ -z "$rejected" ] || printf 'Tried:\n%s' "$rejected"
    echo "Install one, for example"
    echo "  Debian, Ubuntu:  apt install python3.12 python3.12-venv"
    echo "  Fedora, RHEL:    dnf install python3.12"
    echo "  pyenv:           pyenv install 3.12"
    echo "  conda:           conda create -n py312 python=3.12"
    echo "or name it:        PYTHON=/path/to/python3.12 make env"
} >&2
exit 1
