"""The rendezvous store: keys and values that the processes of a job share, before there is any other transport.

`TCPStore` talks to a server process (`spawn_server`, or a TCPStore with `is_master=True`), `FileStore` shares a file,
`HashStore` is within one process, and `PrefixStore` puts a prefix before each user's keys. All satisfy `Store`.

Nothing here loads torch. Each name below is imported from its module when it is first used, so that the server's own
process, which imports this package too, starts fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from disttrain.lazy_names import lazily

if TYPE_CHECKING:
    from disttrain.store.base import Store as Store
    from disttrain.store.client import TCPStore as TCPStore
    from disttrain.store.file import FileStore as FileStore
    from disttrain.store.memory import HashStore as HashStore
    from disttrain.store.prefix import PrefixStore as PrefixStore
    from disttrain.store.protocol.auth import new_token as new_token
    from disttrain.store.protocol.auth import read_token as read_token
    from disttrain.store.protocol.auth import write_token as write_token
    from disttrain.store.protocol.limits import Limits as Limits
    from disttrain.store.protocol.values import Value as Value
    from disttrain.store.serving.process import ServerProcess as ServerProcess
    from disttrain.store.serving.process import certificates_from_settings as certificates_from_settings
    from disttrain.store.serving.process import spawn_server as spawn_server
    from disttrain.store.standby.follower import Following as Following
    from disttrain.store.tls.certificates import Certificates as Certificates

__getattr__, __dir__, __all__ = lazily(__name__)
