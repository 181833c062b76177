#!/usr/bin/env bash
# install.sh: of what the compose test needs, what is not there: a Docker engine and mmdebstrap, Debian's, for which this must run as
# root. Quick when all is there, whoever has installed it.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
packages=()
if ! command -v docker >/dev/null || ! command -v dockerd >/dev/null; then packages+=(docker.io); fi
if ! command -v mmdebstrap >/dev/null; then packages+=(mmdebstrap); fi
if [ ${#packages[@]} = 0 ]; then exit 0; fi

if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
  echo "Not here, and to be installed from Debian's packages only, as root: apt-get install ${packages[*]}." >&2
  echo "A Docker engine (20.10 or newer) and mmdebstrap from elsewhere do as well." >&2
  exit 1
fi
# The packages' own services stay off: the test starts an engine of its own.
policy=/usr/sbin/policy-rc.d
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if [ ! -e $policy ]; then
  trap 'rm -f "$log" $policy' EXIT
  printf '#!/bin/sh\nexit 101\n' >$policy
  chmod +x $policy
fi
echo "installing ${packages[*]}"
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update && apt-get install --yes --no-install-recommends "${packages[@]}"; } >"$log" 2>&1; then
  tail -20 "$log" >&2
  echo "${packages[*]} could not be installed by apt-get" >&2
  exit 1
fi
