#!/usr/bin/env bash
# Makes the folder to mount: ./build_docker.sh [--out DIR]   (default: build/)
# With a Docker engine inside the Dockerfile's build stage, else with this machine's toolchain; csrc/build_artifact.py does it in both.
# BUILD_BASE=IMAGE[@sha256:...] in the environment is the image of that stage (default: the Dockerfile's).
set -euo pipefail

checkout=$(cd "$(dirname "$0")" && pwd)
out=$checkout/build
while (($#)); do
  case "$1" in
    --out) out=${2-}; shift $(($# > 1 ? 2 : 1)) ;;
    --out=*) out=${1#--out=}; shift ;;
    *) echo "usage: $0 [--out DIR]" >&2; exit 2 ;;
  esac
done
[[ -n $out ]] || { echo "build_docker.sh: --out needs a folder" >&2; exit 2; }
out=$(realpath -m "$out")
if [[ $out == *[,\"]* ]]; then
  echo "build_docker.sh: $out has a comma or a quotation mark, which Docker's --output and --mount do not take; choose another --out" >&2
  exit 2
fi
cd "$checkout"

export DOCKER_BUILDKIT=1 # the only builder from Docker 23 on; 20.10 has it, too

made() {
  echo "build_docker.sh: made $out, for"
  echo "  docker run --mount type=bind,source=\"$out/deepseek_v4_sm120/..\",target=/opt/deepseek_v4_sm120,readonly" \
    "-e PYTHONPATH=/opt/deepseek_v4_sm120 ...   # README.md, The first token"
}

# why no engine builds here; nothing where one does
without_engine() {
  command -v docker >/dev/null || { echo "there is no docker"; return; }
  docker info >/dev/null 2>&1 || { (docker version 2>&1 >/dev/null || :) | tail -n 1; return; }
  docker build --help 2>/dev/null | grep -e --output >/dev/null ||
    echo "docker build needs docker-buildx-plugin; Debian and Ubuntu call it docker-buildx"
}

why=$(without_engine)
if [[ -n $why ]]; then
  echo "build_docker.sh: not in Docker ($why): building with this machine's toolchain"
  for python in python3 python3.14 python3.13 python3.12 python3.11; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      "$python" csrc/build_artifact.py --out "$out"
      compgen -G "$out/deepseek_v4_sm120/_C.cpython-312-*" >/dev/null ||
        echo "build_docker.sh: WARNING: not for Python 3.12, which SGLang's images run: here is none with headers" >&2
      made
      exit
    fi
  done
  echo "build_docker.sh: needs Docker, or Python 3.11 or newer" >&2
  exit 1
fi

# what is in $out is deleted: nothing but an earlier artifact may be there (check_replaceable of csrc/build_folder.py)
if [[ -e $out ]] && foreign=$(ls -A "$out" | grep -vxE 'deepseek_v4_sm120(-.+\.dist-info)?|sitecustomize\.py|__pycache__'); then
  echo "build_docker.sh: $out holds ${foreign%%$'\n'*}, which no artifact has; choose another --out, or an empty folder" >&2
  exit 1
fi
commit=$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
if [[ $commit != unknown && -n $(git status --porcelain -- csrc deepseek_v4_sm120 sitecustomize.py pyproject.toml) ]]; then
  commit+=-dirty
fi
mkdir -p "$(dirname "$out")"
beside=$(dirname "$out")/.$(basename "$out")
fresh=$(mktemp -d "$beside.new-XXXXXX")
old=$beside.old-$$
trap 'rm -rf "$fresh"; [[ -e $out || ! -e $old ]] || mv "$old" "$out"' EXIT
arguments=(--build-arg "GIT_COMMIT=$commit" ${BUILD_BASE:+--build-arg "BUILD_BASE=$BUILD_BASE"})
docker build --progress plain --target artifact "${arguments[@]}" --output "type=local,dest=$fresh" . || {
  echo "build_docker.sh: docker build failed, see above; without Docker: python3 csrc/build_artifact.py --out \"$out\"" >&2
  exit 1
}
chmod 755 "$fresh" # mktemp made it 700; the container may run as another user
rm -rf "$beside.old-"* || : # of the build before: containers may have what is replaced now mounted, and it stays (published)
[[ ! -e $out ]] || mv "$out" "$old"
mv "$fresh" "$out"
made
