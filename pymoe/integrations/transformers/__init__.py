"""pymoe inside models of the Hugging Face library transformers (version 5 or newer).

::

    import pymoe.integrations.transformers  # registers the name "pymoe"

    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="pymoe")

``from_config`` and ``model.set_experts_implementation`` take the name, too. The model keeps its parameters, its router
and its state dict; forward, backward, ``generate`` and ``torch.compile(fullgraph=True)`` run on
:mod:`pymoe.ops`. ``from_pretrained(..., quantization_config=PymoeConfig(bits=4))`` rounds experts to 4 bits. Importing
this package raises :class:`ImportError` if transformers is missing or older.
"""

from typing import TYPE_CHECKING, Any

from pymoe import nn
from pymoe._common.names import no_such_name
from pymoe.integrations.transformers import outside, peft_layers, quantized, quantizer, replayed, sharded
from pymoe.integrations.transformers.biases import add_expert_biases
from pymoe.integrations.transformers.checkpoints import from_transformers, to_transformers
from pymoe.integrations.transformers.configuration import PymoeConfig
from pymoe.integrations.transformers.experts import experts_forward
from pymoe.integrations.transformers.interface import register
from pymoe.integrations.transformers.router_losses import add_router_losses
from pymoe.integrations.transformers.routing import Attached, count_expert_load
from pymoe.integrations.transformers.switch import disable, enable

if TYPE_CHECKING:
    from pymoe.integrations.transformers.load_callback import LoadCallback

__all__ = [
    "Attached",
    "LoadCallback",
    "PymoeConfig",
    "add_expert_biases",
    "add_router_losses",
    "count_expert_load",
    "disable",
    "enable",
    "experts_forward",
    "from_transformers",
    "to_transformers",
]


def __getattr__(name: str) -> Any:
    # LoadCallback is imported on first use, because the module of its base class imports PEFT and accelerate.
    if name == "LoadCallback":
        from pymoe.integrations.transformers.load_callback import LoadCallback

        return LoadCallback
    raise no_such_name(__name__, name, __all__, {one: f"it is pymoe.nn.{one}" for one in nn.__all__})


register(experts_forward)
quantized.register()
outside.register()
quantizer.register()
peft_layers.register()
replayed.register()
sharded.register()
