"""Send URLs as they are written: a signed URL is valid only character by character."""

import re
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    import aiohttp
    import yarl

__all__ = ["CLIENT_OPTIONS", "encode_url"]

# a percent sign that begins no escape, and characters that RFC 3986 does not allow in a URL
_INVALID = re.compile(r"%(?![0-9A-Fa-f]{2})|[^A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=%]")


def encode_url(text: str) -> "yarl.URL":
    """Parse a URL; only characters that are invalid in a URL are percent-encoded, and the host by IDNA.

    The fragment, which is not sent, is dropped.

    Raises:
        ValueError: it is not a URL.
    """
    import yarl

    # Location headers that are not UTF-8 contain surrogates for their bytes
    escaped = _INVALID.sub(lambda match: quote(match[0].encode("utf-8", "surrogateescape")), text)
    written = yarl.URL(escaped, encoded=True)
    return yarl.URL.build(
        scheme=written.scheme,
        authority=yarl.URL(text).raw_authority,
        path=written.raw_path,
        query_string=written.raw_query_string,
        encoded=True,
    )


async def _encode_redirect(
    request: "aiohttp.ClientRequest", send: "aiohttp.ClientHandlerType"
) -> "aiohttp.ClientResponse":
    """Encode the URL of a request, which after a redirect is the text of a ``Location`` header."""
    url = encode_url(str(request.url))
    if url.raw_host != request.url.raw_host:  # encoded by IDNA
        request.headers["Host"] = url.host_port_subcomponent
    request.url = url
    return await send(request)


CLIENT_OPTIONS = {
    "requote_redirect_url": False,
    "middlewares": (_encode_redirect,),
}  # of aiohttp.ClientSession
