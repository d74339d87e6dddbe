# shellcheck shell=bash
# Sourced by quickstart and test: finds Python, keeps a virtual environment up to date.

# The first Python that mlx-k3 supports. One that exists only as a shim does not count.
find_python() {
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11 python; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
      2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "Python 3.11 to 3.13 is needed and was not found; see https://www.python.org/downloads" >&2
  return 1
}

# What to install for this machine: MLX is complete on macOS, on Linux an extra brings its backend.
requirement() {
  local driver
  if [ "$(uname)" != Linux ]; then
    echo "."
  elif ! driver=$(nvidia-smi 2>/dev/null); then
    echo ".[cpu]"
  else
    case $driver in
      *"CUDA Version: 1"[3-9]* | *"CUDA Version: "[2-9][0-9]*) echo ".[cuda13]" ;;
      *) echo ".[cuda12]" ;;
    esac
  fi
}

# prepare FOLDER REQUIREMENT: install the checkout into FOLDER, unless that has been done for
# these very dependencies. REQUIREMENT is "." with extras.
prepare() {
  local folder=$1 requirement=$2 python stamp
  stamp="$requirement $(cksum < pyproject.toml)"
  if [ -f "$folder/installed" ] && [ "$(cat "$folder/installed")" = "$stamp" ]; then
    return
  fi
  if [ ! -x "$folder/bin/python" ]; then
    python=$(find_python)
    echo "Creating $folder with $("$python" --version)"
    if ! "$python" -m venv "$folder"; then
      rm -rf "$folder"
      echo "Python's venv module is not complete; on Debian: apt install python3-venv" >&2
      return 1
    fi
  fi
  echo "Installing mlx-k3 (a minute or two)"
  "$folder/bin/python" -m pip install --quiet --editable "$requirement"
  echo "$stamp" > "$folder/installed"
}

# install_package NAME PACKAGE: install a Debian package, where that takes no password.
install_package() {
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing $2"
    if apt-get -qq update >/dev/null &&
      apt-get -qq install --yes --no-install-recommends "$2" >/dev/null; then
      return
    fi
  fi
  echo "Going on without $1; on Debian: apt install $2" >&2
}

# On Linux, have OpenBLAS for MLX's products on the CPU. Its tests are skipped without it. Needs
# python.
ensure_openblas() {
  if [ "$(uname)" = Linux ] &&
    ! python -c 'import ctypes; ctypes.CDLL("libopenblas.so.0")' 2>/dev/null; then
    install_package OpenBLAS libopenblas0
  fi
}

# On Linux, have the compiler that executes kernels in the tests, which are skipped without it.
ensure_clang() {
  if [ "$(uname)" = Linux ] && ! command -v clang++ >/dev/null; then
    install_package clang++ clang
  fi
}
