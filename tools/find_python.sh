#!/bin/sh
# Prints the Python to make an environment with:  tools/find_python.sh newest|oldest LOW HIGH
#
# LOW and HIGH are minor versions of Python 3: "12 14" is 3.12 to 3.14, both included. Looked at are
# the names on PATH and the folders where pyenv and uv keep versions; a name on PATH may be a
# stand-in that only prints an error, so each candidate has to run, and to be able to make
# environments. Prints nothing where none fits.
set -eu

order=$1 low=$2 high=$3
pyenv=${PYENV_ROOT:-$HOME/.pyenv}/versions
uv=${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}
probe='import ensurepip, os, sys, venv
if '$low' <= sys.version_info[1] <= '$high' and sys.version_info[0] == 3:
    print("%03d %03d %s" % (*sys.version_info[1:3], os.path.realpath(sys.executable)))'

minor=$low
names=python3
while [ "$minor" -le "$high" ]; do
    names="$names python3.$minor"
    minor=$((minor + 1))
done

case $order in
newest) sort="sort -r" ;;
oldest) sort="sort -k1,1n -k2,2nr" ;;
*) echo "find_python.sh: '$order' is neither newest nor oldest" >&2; exit 2 ;;
esac

for candidate in $names "$pyenv"/*/bin/python3 "$uv"/*/bin/python3; do
    "$candidate" -c "$probe" 2>/dev/null || true
done | $sort | head -n 1 | cut -d ' ' -f 3-
