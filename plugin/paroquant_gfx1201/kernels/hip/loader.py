"""Launches on an AMD GPU: code objects that the wheel carries, through libamdhip64 alone.

No compiler runs at boot: ``python -m paroquant_gfx1201.kernels.hip.codeobject build`` makes ``objects/*.co`` before the
wheel is built. Launches go to the stream they are given and allocate nothing on the device but their outputs, so that a
graph can capture them.
"""

import ctypes
from dataclasses import dataclass, field
from pathlib import Path

import torch

from paroquant_gfx1201.errors import PluginError
from paroquant_gfx1201.kernels.hip.launch import OBJECTS, InOut, Launch, Out

LIBRARY = "libamdhip64.so"


@dataclass
class Loader:
    """Kernels of one process. library: a libamdhip64; objects: where the code objects are."""

    library: str = LIBRARY
    objects: Path = OBJECTS
    _modules: dict[str, ctypes.c_void_p] = field(default_factory=dict)
    _functions: dict[tuple[str, str], ctypes.c_void_p] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            self._hip = ctypes.CDLL(self.library)
        except OSError as error:
            raise PluginError(f"cannot load {self.library}: {error}; is ROCm's runtime installed?") from None
        self._hip.hipGetErrorString.restype = ctypes.c_char_p

    def _check(self, status: int, what: str) -> None:
        if status:
            text = self._hip.hipGetErrorString(status)
            raise PluginError(f"{what} failed with HIP error {status}: {text.decode() if text else 'unknown'}")

    def _function(self, launch: Launch) -> ctypes.c_void_p:
        key = (launch.source, launch.kernel)
        if key not in self._functions:
            if launch.source not in self._modules:
                path = self.objects / Path(launch.source).with_suffix(".co").name
                try:
                    image = path.read_bytes()
                except FileNotFoundError:
                    raise PluginError(
                        f"{path} is missing: this installation carries no gfx1201 code; "
                        "run python -m paroquant_gfx1201.kernels.hip.codeobject build"
                    ) from None
                module = ctypes.c_void_p()
                self._check(self._hip.hipModuleLoadData(ctypes.byref(module), image), f"loading {path}")
                self._modules[launch.source] = module
            function = ctypes.c_void_p()
            name = launch.kernel.encode()
            status = self._hip.hipModuleGetFunction(ctypes.byref(function), self._modules[launch.source], name)
            self._check(status, f"finding {launch.kernel}")
            self._functions[key] = function
        return self._functions[key]

    def run(self, launch: Launch, stream: int | None = None) -> list[torch.Tensor]:
        """Enqueue the launch on ``stream`` (a hipStream_t as an integer); its Out and InOut tensors, in order.

        Every tensor must be contiguous and on one device; outputs are allocated there, uninitialised. An InOut tensor
        is written in place. Raises PluginError for a tensor that is not, or an error of the runtime.
        """
        tensors = [part for part in launch.arguments if isinstance(part, torch.Tensor)]
        device = tensors[0].device
        outputs: list[torch.Tensor] = []
        values: list[ctypes.c_void_p | ctypes.c_int] = []
        for index, argument in enumerate(launch.arguments):
            if isinstance(argument, int):
                values.append(ctypes.c_int(argument))
                continue
            if isinstance(argument, Out):
                tensor = torch.empty(argument.shape, dtype=argument.dtype, device=device)
            else:
                tensor = argument.tensor if isinstance(argument, InOut) else argument
            if tensor.device != device or not tensor.is_contiguous():
                raise PluginError(f"{launch.kernel}: argument {index} must be contiguous and on {device}")
            if not isinstance(argument, torch.Tensor):
                outputs.append(tensor)
            values.append(ctypes.c_void_p(tensor.data_ptr()))
        addresses = [ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values]
        parameters = (ctypes.c_void_p * len(values))(*addresses)
        grid = [ctypes.c_uint(size) for size in [*launch.grid, 1, 1][:3]]
        block = [ctypes.c_uint(launch.threads), ctypes.c_uint(1), ctypes.c_uint(1)]
        status = self._hip.hipModuleLaunchKernel(
            *(self._function(launch), *grid, *block, ctypes.c_uint(launch.dynamic_lds)),
            *(ctypes.c_void_p(stream), parameters, None),
        )
        self._check(status, f"launching {launch.kernel}")
        return outputs
