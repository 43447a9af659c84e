"""`refuse_browsers`: pages of other sites reach a server without a key through their reader's
browser, unless refused.

A page may send a POST of plain text to any address, 127.0.0.1 among them, and needs no permission
for that. It may also let its own name mean 127.0.0.1 (DNS rebinding), and then reads the answers
too. In the first case the browser names the page in `Origin`; in the second, its name is in `Host`.
Programs send no `Origin`, so neither check is in their way. A server with a key needs neither: no
page can add the key to what it sends.
"""

import ipaddress
import re
from collections.abc import Mapping

from weft.transforms.server.refusals import Refusal

_PLACE = re.compile(r"(\[(?P<address>[^\[\]]+)\]|(?P<name>[^:\[\]/@]*))(:[0-9]*)?")


def refuse_browsers(headers: Mapping[str, str], is_local: bool) -> None:
    """Refuse a request that a page of another site made.

    Args:
        headers: of the request, with names in small letters.
        is_local: the server listens on this machine alone.

    Raises:
        Refusal: 403, with the header that says so.
    """
    host = _name_of(headers.get("host", ""))
    if is_local and not is_loopback(host):
        message = (
            f"Host {headers.get('host')!r:.100} to a server of this machine alone: use localhost,"
            " or give it a key"
        )
        raise Refusal(403, message, "permission_error", code="forbidden_host")
    origin = headers.get("origin")
    if origin is not None:
        name = _name_of(origin.partition("://")[2])
        if name != host and not is_loopback(name):
            message = (
                f"Origin {origin!r:.100}: pages of other sites are not answered; start the server"
                " with a key for that"
            )
            raise Refusal(403, message, "permission_error", code="forbidden_origin")


def is_loopback(name: str) -> bool:
    """Whether a host's name or address means this machine."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _name_of(place: str) -> str:
    """The name in `name:port`, `[address]:port` or either alone, in small letters; empty if it is
    none of these."""
    parts = _PLACE.fullmatch(place.strip().lower().rstrip("/"))
    if parts is None:
        return ""
    return parts["address"] or parts["name"].rstrip(".")
