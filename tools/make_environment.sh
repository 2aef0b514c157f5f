#!/bin/sh
# Makes an environment, or brings it up to date:
#
#   tools/make_environment.sh FOLDER newest|oldest LOW HIGH PACKAGES... [--alone PACKAGES...]
#
# The Python is the newest or oldest one of 3.LOW to 3.HIGH that this machine has, or $PYTHON.
# PACKAGES are arguments of pip install, those behind --alone are installed without what they
# require; $PIP_ARGS are more options of pip. Says first how much will be downloaded.
set -euf
cd "$(dirname "$0")/.."

folder=$1 order=$2 low=$3 high=$4
shift 4
python=${PYTHON:-$(tools/find_python.sh "$order" "$low" "$high")}
probe="import ensurepip, sys, venv; sys.exit(not (3, $low) <= sys.version_info[:2] <= (3, $high))"
if [ -z "$python" ]; then
    echo "$folder needs Python 3.$low to 3.$high with venv, and none was found: not on PATH, and not in" \
        "the folders of pyenv and uv. Install one, or pass its path: make PYTHON=/path/to/python3.$high" >&2
    exit 1
elif ! "$python" -c "$probe" 2>/dev/null; then
    echo "$folder needs Python 3.$low to 3.$high with venv, and PYTHON=$python is not that. Pass another" \
        "path, or none: then one is looked for." >&2
    exit 1
fi

minor() { "$1" -c 'import sys; print(sys.version_info[1])' 2>/dev/null || true; }
echo "$folder: preparing it with $("$python" -V), $python"
# An environment of another Python is made anew.
if [ "$(minor "$folder/bin/python")" != "$(minor "$python")" ]; then
    "$python" -m venv --clear "$folder"
fi
pip="$folder/bin/python -m pip"
$pip install -qq "pip>=26"

alone=
packages=
for argument; do
    if [ "$argument" = --alone ]; then alone=yes
    elif [ -n "$alone" ]; then alone="$alone $argument"
    else packages="$packages $argument"
    fi
done
# Words are split on purpose: no requirement in the Makefile has a space.
# shellcheck disable=SC2086
{
    "$folder/bin/python" tools/download_size.py ${PIP_ARGS:-} $packages
    echo "$folder: installing (a few minutes the first time)"
    start=$(date +%s)
    $pip install -qq ${PIP_ARGS:-} $packages
    [ -z "$alone" ] || $pip install -qq --no-deps ${PIP_ARGS:-} ${alone#yes}
}
echo "$folder: ready after $(($(date +%s) - start)) s"
touch "$folder/.installed"
