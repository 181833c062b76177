"""Where there is no GPU, Triton's kernels run in its interpreter. Imported by the conftest of whatever tests them."""

import os
import sys
import types

import torch

if not torch.cuda.is_available():
    # Triton asks as it is imported.
    assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1"
    os.environ["TRITON_INTERPRET"] = "1"

    import triton.language
    from triton.runtime import interpreter

    _patch_lang_tensor = interpreter._patch_lang_tensor

    def _patch(tensor: type, scope: "interpreter._LangPatchScope") -> None:
        """Triton 3.6 makes integers of arrays of one element, for `range`, by int(): NumPy 2.4 has no more of that."""
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch

    # Triton 3.6 sets up the language anew for each function that a kernel calls, which takes longer than most of them.
    _patch_lang = interpreter._patch_lang
    _whole = types.SimpleNamespace(__globals__={"tl": triton.language, "core": triton.language.core})

    def _call(self: "interpreter.InterpretedFunction", *args: object, **kwargs: object) -> object:
        return self.rewrite()(*args, **kwargs)

    interpreter._patch_lang = lambda fn: _patch_lang(_whole)
    interpreter.InterpretedFunction.__call__ = _call
