#!/usr/bin/env bash
# install.sh DIRECTORY: what the browser tests need. Playwright goes into DIRECTORY, by $PIP; Chromium, where there is none, is
# Debian's, for which this must run as root. Quick when all is there.
set -euo pipefail
site=$1
requirements=$(dirname "${BASH_SOURCE[0]}")/requirements.txt

if ! cmp -s "$requirements" "$site/requirements.txt"; then
  rm -rf "$site"
  ${PIP:-python3 -m pip} install --quiet --target "$site" --requirement "$requirements"
  cp "$requirements" "$site/"
fi

for name in ${KVRELAY_TEST_CHROMIUM:-} chromium chromium-browser google-chrome google-chrome-stable; do
  if command -v "$name" >/dev/null; then exit 0; fi
done
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
  echo "There is no Chromium here, and only Debian's can be installed, as root: apt-get install chromium fonts-dejavu-core." >&2
  echo "Or name one of yours: make browser-test KVRELAY_TEST_CHROMIUM=/path/to/chrome" >&2
  exit 1
fi
echo "installing Chromium"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update && apt-get install --yes --no-install-recommends chromium fonts-dejavu-core; } >"$log" 2>&1; then
  tail -20 "$log" >&2
  echo "Chromium could not be installed by apt-get" >&2
  exit 1
fi
