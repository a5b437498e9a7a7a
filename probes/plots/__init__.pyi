"""Public names of the package and the modules that define them."""

from .curves import line as line
from .curves import lines as lines
from .decoders import confusion as confusion
from .decoders import decoding as decoding
from .decoders import similarity as similarity
from .graphs import control_flow as control_flow
from .looped import halting as halting
from .looped import nudges as nudges
from .looped import states as states
from .looped import steps as steps
from .matrices import attention as attention
from .matrices import gates as gates
from .matrices import matrix as matrix
from .matrices import value_scores as value_scores
from .modules import activation as activation
from .modules import specialization as specialization
from .points import projection as projection
from .rates import bars as bars
from .rates import erasure as erasure
from .rates import interchange as interchange
from .retrievals import pairing as pairing
from .signs import distribution as distribution
from .signs import signedness as signedness
