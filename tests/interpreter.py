"""Where there is no GPU, Triton's kernels run in its interpreter. Imported by the conftest of whatever tests them."""

import os
import sys

import torch

if not torch.cuda.is_available():
    # Triton asks as it is imported.
    assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1"
    os.environ["TRITON_INTERPRET"] = "1"

    from triton.runtime import interpreter

    _patch_lang_tensor = interpreter._patch_lang_tensor

    def _patch(tensor: type, scope: "interpreter._LangPatchScope") -> None:
        """Triton 3.6 makes integers of arrays of one element, for `range`, by int(): NumPy 2.4 has no more of that."""
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch

    def _call(self: "interpreter.InterpretedFunction", *args: object, **kwargs: object) -> object:
        """A function that a kernel calls: Triton 3.6 sets up the language anew for each, which takes longer than most of them."""
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = _call
