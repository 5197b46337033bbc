"""The socket of one process of an engine: the leader's, which listens, or a follower's."""

import errno
import socket

import zmq

from dcpjax.config import DistributedConfig
from dcpjax.engine.link_messages import MAX_FRAME_BYTES
from dcpjax.errors import ConfigError
from dcpjax.transfer.side_channel import channel_address

BEAT_SECONDS = 0.5
SILENCE_SECONDS = 5.0
"""A process that does not answer for so long is gone. ZeroMQ's own threads ask and answer, so a
busy process answers all the same."""

_CANNOT_LISTEN = {
    errno.EADDRINUSE: "nobody else listens at master_addr and master_port: another process does, "
    "perhaps of another engine, or a second one with node_rank 0",
    errno.EADDRNOTAVAIL: "master_addr is an address of the host of the process with node_rank 0",
}


def open_socket(context: zmq.Context, config: DistributedConfig) -> zmq.Socket:
    """A socket that listens, or finds the leader as soon as that does.

    Raises:
        ConfigError: the address is unknown, or the leader cannot listen there. The context is
            destroyed then.
    """
    try:
        _check_known(config)
        return _listen(context, config) if config.is_leader else _connect(context, config)
    except ConfigError:
        context.destroy(linger=0)
        raise


def _check_known(config: DistributedConfig) -> None:
    """ZeroMQ would call an unknown name a missing device, or look for it for ever."""
    try:
        socket.getaddrinfo(config.master_addr, config.master_port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: no host name at all, says idna
        raise ConfigError(
            "master_addr is an IP address or the name of a host that is known here",
            master_addr=config.master_addr,
            reason=(error.strerror if isinstance(error, OSError) else None) or str(error),
        ) from error


def _listen(context: zmq.Context, config: DistributedConfig) -> zmq.Socket:
    opened = _configured(context, zmq.ROUTER, config)
    opened.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        opened.bind(channel_address(config.master_addr, config.master_port))
    except zmq.ZMQError as error:
        rule = _CANNOT_LISTEN.get(
            error.errno or 0, "the leader can listen at master_addr and master_port"
        )
        raise ConfigError(
            rule,
            master_addr=config.master_addr,
            master_port=config.master_port,
            reason=zmq.strerror(error.errno or 0),
        ) from error
    return opened


def _connect(context: zmq.Context, config: DistributedConfig) -> zmq.Socket:
    opened = _configured(context, zmq.DEALER, config)
    opened.connect(channel_address(config.master_addr, config.master_port))
    return opened


def _configured(context: zmq.Context, kind: int, config: DistributedConfig) -> zmq.Socket:
    opened = context.socket(kind)
    opened.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_FRAME_BYTES)
    opened.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * BEAT_SECONDS))
    opened.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * SILENCE_SECONDS))
    opened.setsockopt(zmq.IPV6, ":" in config.master_addr)
    opened.setsockopt(zmq.SNDHWM, 0)  # bounded by what the leader waits for
    opened.setsockopt(zmq.RCVHWM, 0)
    return opened
