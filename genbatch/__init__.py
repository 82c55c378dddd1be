"""Many callers, one language model: the names that programs use.

    from genbatch import open_batcher

    async with open_batcher("smollm2", n_parallel=4) as batcher:
        print((await batcher.generate("The capital of France is", max_tokens=8)).text)

A name is imported when it is first used, so a client of a service never waits for torch. `__all__` lists the names;
what is not there may change from one version to the next. The folders beside this file are links to the layers at the
top of the repository: `clients` calls `actors`, and both use `nif` and `proto`.
"""
# ruff: noqa: I001  # one statement a module, with the `as` that makes a name public to type checkers

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors, which do not run __getattr__
    from genbatch.actors.batcher.options import BatcherOptions as BatcherOptions
    from genbatch.actors.scheduling.plan import (
        BatchingType as BatchingType,
        CapacityOutput as CapacityOutput,
        MicroBatchOutput as MicroBatchOutput,
        SchedulerError as SchedulerError,
        SchedulerOutput as SchedulerOutput,
        StepLimits as StepLimits,
    )
    from genbatch.actors.scheduling.request import (
        KVResources as KVResources,
        LlmRequest as LlmRequest,
        RequestList as RequestList,
    )
    from genbatch.actors.scheduling.scheduler import (
        CapacityScheduler as CapacityScheduler,
        FIFOScheduler as FIFOScheduler,
        MicroBatchScheduler as MicroBatchScheduler,
        PauseOrder as PauseOrder,
        PrefillFirstScheduler as PrefillFirstScheduler,
        RequestScheduler as RequestScheduler,
        SchedulerPolicy as SchedulerPolicy,
        SimpleScheduler as SimpleScheduler,
    )
    from genbatch.actors.security.key_files import AddressError as AddressError, KeyFileError as KeyFileError
    from genbatch.actors.service.options import ServiceOptions as ServiceOptions
    from genbatch.clients.in_process import BatcherClient as BatcherClient, open_batcher as open_batcher
    from genbatch.clients.interface import (
        Client as Client,
        ClientClosed as ClientClosed,
        ClientError as ClientError,
        EmbedParams as EmbedParams,
        GenerateParams as GenerateParams,
        MessageLike as MessageLike,
        ScoreParams as ScoreParams,
        Stream as Stream,
        StreamNotEnded as StreamNotEnded,
        SyncClient as SyncClient,
        SyncStream as SyncStream,
        Texts as Texts,
    )
    from genbatch.clients.offline import (
        InferenceEngine as InferenceEngine,
        InferenceSession as InferenceSession,
        OfflineScheduler as OfflineScheduler,
        generate_batch as generate_batch,
    )
    from genbatch.clients.remote import Retry as Retry, RPCClient as RPCClient, ZeroMQClient as ZeroMQClient
    from genbatch.clients.sync import SyncRPCClient as SyncRPCClient, SyncZeroMQClient as SyncZeroMQClient
    from genbatch.nif.engine_options import EngineOptions as EngineOptions
    from genbatch.nif.errors import ModelError as ModelError, NativeError as NativeError, OptionError as OptionError
    from genbatch.proto.errors import (
        Cancelled as Cancelled,
        DeadlineExceeded as DeadlineExceeded,
        EngineError as EngineError,
        EngineLost as EngineLost,
        Forbidden as Forbidden,
        FrameTooLarge as FrameTooLarge,
        GenbatchError as GenbatchError,
        InvalidRequest as InvalidRequest,
        MalformedMessage as MalformedMessage,
        ModelNotFound as ModelNotFound,
        PromptTooLong as PromptTooLong,
        QueueFull as QueueFull,
        Unauthenticated as Unauthenticated,
        Unavailable as Unavailable,
        UnknownMethod as UnknownMethod,
    )
    from genbatch.proto.messages import (
        Choice as Choice,
        Embeddings as Embeddings,
        GenerateRequest as GenerateRequest,
        Message as Message,
        NamedTool as NamedTool,
        Ranked as Ranked,
        Ranking as Ranking,
        ResponseFormat as ResponseFormat,
        Result as Result,
        Scores as Scores,
        Token as Token,
        TokenLogprob as TokenLogprob,
        Tool as Tool,
        ToolCall as ToolCall,
        ToolCallDelta as ToolCallDelta,
        Usage as Usage,
    )
    from genbatch.proto.service_messages import Drained as Drained, Health as Health, ModelCard as ModelCard
    from genbatch.proto.validation import RequestLimits as RequestLimits

# The same for the running program: module -> the names that are defined there.
_DEFINED_IN = {
    "actors.batcher.options": "BatcherOptions",
    "actors.scheduling.plan": "BatchingType CapacityOutput MicroBatchOutput SchedulerError SchedulerOutput StepLimits",
    "actors.scheduling.request": "KVResources LlmRequest RequestList",
    "actors.scheduling.scheduler": (
        "CapacityScheduler FIFOScheduler MicroBatchScheduler PauseOrder PrefillFirstScheduler RequestScheduler "
        "SchedulerPolicy SimpleScheduler"
    ),
    "actors.security.key_files": "AddressError KeyFileError",
    "actors.service.options": "ServiceOptions",
    "clients.in_process": "BatcherClient open_batcher",
    "clients.interface": (
        "Client ClientClosed ClientError EmbedParams GenerateParams MessageLike ScoreParams Stream StreamNotEnded "
        "SyncClient SyncStream Texts"
    ),
    "clients.offline": "InferenceEngine InferenceSession OfflineScheduler generate_batch",
    "clients.remote": "Retry RPCClient ZeroMQClient",
    "clients.sync": "SyncRPCClient SyncZeroMQClient",
    "nif.engine_options": "EngineOptions",
    "nif.errors": "ModelError NativeError OptionError",
    "proto.errors": (
        "Cancelled DeadlineExceeded EngineError EngineLost Forbidden FrameTooLarge GenbatchError "
        "InvalidRequest MalformedMessage ModelNotFound PromptTooLong QueueFull Unauthenticated Unavailable "
        "UnknownMethod"
    ),
    "proto.messages": (
        "Choice Embeddings GenerateRequest Message NamedTool Ranked Ranking ResponseFormat Result Scores Token "
        "TokenLogprob Tool ToolCall ToolCallDelta Usage"
    ),
    "proto.service_messages": "Drained Health ModelCard",
    "proto.validation": "RequestLimits",
}
_MODULES = {name: f"genbatch.{module}" for module, names in _DEFINED_IN.items() for name in names.split()}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # with a parser of e-mail: who never asks does not wait for it

        return version("genbatch")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
