#!/bin/sh
# install.sh EXTRA...: what the project needs with these extras, pinned, into the environment of the image, or what that lacks of it below
# $ROOT, as it will lie there; then away with what nothing loads: archives, headers, Cython's sources, tests, what is for debuggers, copies of libraries where there should be links.
set -eu
python3 needs.py "$@" > needs.txt
ucx=requirements-ucx.lock
case " $* " in *" ucx-cu13 "*) ucx=requirements-ucx-cu13.lock ;; esac
pip --python /opt/kvrelay/bin/python install ${ROOT:+--root "$ROOT"} --constraint requirements.lock --constraint "$ucx" --requirement needs.txt

cd "${ROOT:-}"/opt/kvrelay/lib/python3*/site-packages
find . -type f \( -name '*.a' -o -name '*.pyx' -o -name '*.pyx.in' -o -name '*.pxd' -o -name '*.h' -o -name '*.hpp' -o -name '*.cuh' \) -delete
[ ! -d numpy ] || find numpy -type d -name tests -prune -exec rm -rf {} +
rm -rf libucx/bin libucx/lib/ucx/libucx_perftest* torch/include torch/test
[ ! -d torch/bin ] || find torch/bin -type f ! -name torch_shm_manager -delete
for library in libucx/lib/*.so.0 libucx/lib/ucx/*.so.0; do
  [ -f "$library" ] || continue
  for copy in "${library%.0}" "$library.0.0"; do
    if cmp -s "$library" "$copy"; then ln -sf "$(basename "$library")" "$copy"; fi
  done
done
# Not what wheels have renamed and patched (libucx, *.libs): strip breaks it.
find . -name '*.so*' -type f ! -path './*.libs/*' ! -path './libucx/*' | while read -r library; do
  if readelf --sections --wide "$library" | grep -q '\.debug_info'; then strip --strip-unneeded "$library"; fi
done
