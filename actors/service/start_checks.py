"""What can be told of a start before torch is imported and a model is loaded, so that a mistake costs no minute."""

from pathlib import Path

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.gateways.addresses import check_nobody_listens, parse_http_address
from genbatch.actors.scheduling.spec import check_scheduler
from genbatch.actors.security.key_files import AddressError
from genbatch.actors.service.gateway_process import check_listeners
from genbatch.actors.service.options import ServiceOptions
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import OptionError
from genbatch.nif.models.model_names import check_source


def check_start(engine: EngineOptions, batcher: BatcherOptions, options: ServiceOptions) -> None:
    """Looks at what the options name: the model's files, the template's, the scheduler, keys, and each address.

    Raises:
        ModelError: there is no such file, or no model in it; an id of Hugging Face may still turn out to be none.
        OptionError: a file that an option names is not there, or an extra is not installed.
        SchedulerError: the scheduler's name leads nowhere.
        AddressError: an address is none, is open to strangers, is taken, or is given twice.
        KeyFileError: a file of keys is missing, faulty or exposed.
    """
    check_listeners(options)  # first: a service that strangers could reach is told so, whatever else is wrong
    check_source(engine.model_path)
    if engine.chat_template and not Path(engine.chat_template).expanduser().is_file():
        raise OptionError("chat_template", f"there is no file {engine.chat_template}")
    if batcher.record is not None and not Path(batcher.record).expanduser().absolute().parent.is_dir():
        raise OptionError("record", f"there is no folder {Path(batcher.record).expanduser().absolute().parent}")
    if isinstance(batcher.scheduler, str):
        check_scheduler(batcher.scheduler)
    seen: set[str] = set()
    for address in _addresses(options):
        if address in seen and not address.endswith((":0", ":*")):
            raise AddressError(address, "it is given twice; each protocol needs an address of its own")
        seen.add(address)
        check_nobody_listens(address)


def _addresses(options: ServiceOptions) -> list[str]:
    """Where the service will listen, as tcp://HOST:PORT, ipc://PATH or unix://PATH."""
    found = [address for address in (options.bind, options.rpc_bind) if address is not None]
    for text in (options.http, options.metrics):
        if text is not None:
            wanted = parse_http_address(text)
            host = f"[{wanted.host}]" if ":" in wanted.host else wanted.host
            found.append(f"tcp://{host}:{wanted.port}")
    return found
