"""The list of all mutations."""

from tests.mutations.engine_guards import ENGINE_GUARDS
from tests.mutations.file_guards import FILE_GUARDS
from tests.mutations.gpu_guards import GPU_GUARDS
from tests.mutations.memory_guards import MEMORY_GUARDS
from tests.mutations.mutation import Mutation
from tests.mutations.overload_guards import OVERLOAD_GUARDS
from tests.mutations.security_guards import SECURITY_GUARDS
from tests.mutations.wire_guards import WIRE_GUARDS

MUTATIONS: tuple[Mutation, ...] = (
    *WIRE_GUARDS,
    *SECURITY_GUARDS,
    *OVERLOAD_GUARDS,
    *MEMORY_GUARDS,
    *FILE_GUARDS,
    *GPU_GUARDS,
    *ENGINE_GUARDS,
)
