"""`refuse_browsers`: keeps web pages of other sites from using a server that has no API key.

Any page may send a POST of plain text to any address, including 127.0.0.1, without permission. A
page may also make its own host name resolve to 127.0.0.1 (DNS rebinding), and can then read the
answers too. In the first case the browser names the page's site in `Origin`; in the second, that
site's name is in `Host`. Other programs send no `Origin`, so the checks do not affect them. A
server with a key needs neither check, because a page cannot know the key.
"""

import ipaddress
import re
from collections.abc import Mapping

from weft.transforms.server.refusals import Refusal

_PLACE = re.compile(r"(\[(?P<address>[^\[\]]+)\]|(?P<name>[a-z0-9._-]*))(:[0-9]*)?")


def refuse_browsers(headers: Mapping[str, str], is_local: bool) -> None:
    """Refuse a request that a page of another site made.

    Args:
        headers: the request's headers, with names in lower case.
        is_local: whether the server listens on this machine alone.

    Raises:
        Refusal: 403, with the header that shows it.
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
        # A page without an origin of its own sends `null`, which gives an empty name: refused, too.
        name = _name_of(origin.partition("://")[2])
        if name != host and not is_loopback(name):
            message = (
                f"Origin {origin!r:.100}: pages of other sites are not answered; start the server"
                " with a key for that"
            )
            raise Refusal(403, message, "permission_error", code="forbidden_origin")


def is_loopback(name: str) -> bool:
    """Whether a host name or address refers to this machine."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _name_of(place: str) -> str:
    """The host in `name:port` or `[address]:port`, whose port may be missing, in lower case; empty
    for any other text."""
    parts = _PLACE.fullmatch(place.strip().lower().rstrip("/"))
    if parts is None:
        return ""
    # A fully qualified name may end with a dot.
    return parts["address"] or parts["name"].rstrip(".")
