#!/usr/bin/env bash
# release.sh VERSION FILE: writes what a host needs, as git holds it at VERSION, into a tar file.
set -euo pipefail

version=$1
mkdir -p "$(dirname "$2")"
file=$(cd "$(dirname "$2")" && pwd)/$(basename "$2")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

fail() {
  echo "release.sh: $*" >&2
  exit 1
}

commit=$(git rev-parse --verify --quiet "$version^{commit}") || fail "git knows no version $version: give a tag or a commit"
# The template and its scripts come from the working tree, the code from git: both have to be the same version.
[ "$commit" = "$(git rev-parse HEAD)" ] || fail "$version is not what is checked out: git checkout $version"
[ -z "$(git status --porcelain --untracked-files=no)" ] || fail "there are changes that are not committed: commit or stash them"

# Root owns the files on a host, and nobody else may write to them.
git -c tar.umask=0022 archive --format=tar --output="$file" "$commit" -- \
  LICENSE apexrl actor.py learner.py replay.py requirements.txt deploy/files deploy/packer
echo "release.sh: $version ($commit) is in $file"
