"""What Triton's interpreter needs, where it stands in for a GPU."""

import sys

import tests.kernels.triton_device as device

if not device.ON_GPU:
    assert "triton" not in sys.modules, (
        "what Triton compiles itself is interpreted only if that is chosen before it is imported"
    )
    from triton.runtime import interpreter

    _patch_lang_tensor = interpreter._patch_lang_tensor

    def _patch(tensor: type, scope: "interpreter._LangPatchScope") -> None:
        """Triton 3.6 makes integers of arrays of one element, for `range`, by int(): NumPy 2.4 has no more of that."""
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch
