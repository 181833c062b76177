#!/bin/sh
# debian-base.sh FILE.tar: the root file system of an image that can stand in for python:3.11-slim-bookworm, made of Debian's own
# packages where no registry can be reached; `docker import FILE.tar python:3.11-slim-bookworm` takes it. Needs root and mmdebstrap.
# As there, `python` and `python3` are 3.11 with venv, and there are certificates, apt, and no compiler; Debian's python3 lies in /usr/bin.
set -eu
exec mmdebstrap --quiet --variant=minbase --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
  --include=ca-certificates,libstdc++6,python3,python3-venv,usr-is-merged \
  --aptopt='Apt::Install-Recommends "false"' --aptopt='Acquire::Languages "none"' \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/info/*' \
  --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/man/*' \
  --customize-hook='ln -s /usr/bin/python3 "$1/usr/local/bin/python"' bookworm "$1"
