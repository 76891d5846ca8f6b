"""``clipkit serve``: a web page and a JSON API that search embeddings.

The API is described at ``/openapi.json``. Only thumbnails of images that the embeddings list are served. Uploads
are decoded with the limits of training data. The server listens on 127.0.0.1 unless another address is given, which
requires a token.
"""

import asyncio
import hmac
import re
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from ipaddress import ip_address
from threading import Semaphore
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, HTTPException, Query, Request, UploadFile
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor

from clipkit.errors import ClipkitError, ConfigError, DataError, nearest
from clipkit.files.terminal import counted, printable
from clipkit.inference.search import (
    TEMPLATES,
    Embeddings,
    EmbeddingsChanged,
    Hit,
    combine_query,
    encode_query,
    load_model,
    stale_note,
    thumbnail,
)
from clipkit.model.clip import CLIP
from clipkit.model.cpu import PackedWeights
from clipkit.options import ServeOptions

MAX_UPLOAD = 32 << 20  # bytes of a request
_UPLOAD_SECONDS = 60.0
# results; characters
_MOST = 200
_MAX_TEXT = 10_000
# of a query
_MAX_PARTS = 20
_MAX_IMAGES = 8
_SIDE = 320  # of thumbnails
_AT_ONCE = 2  # requests that compute
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True, kw_only=True)
class Collection:
    """Embeddings that are searched, with their model."""

    name: str
    embeddings: Embeddings
    model: CLIP

    @cached_property
    def weights(self) -> PackedWeights:
        """A second copy of the weights, for images; a model does not change while it is served."""
        return PackedWeights(self.model)


Text = Annotated[str, StringConstraints(max_length=_MAX_TEXT)]


class Parts(BaseModel):
    """A query. The result is nearest to the mean of what is searched for minus half the mean of what is not."""

    model_config = ConfigDict(extra="allow")  # found() refuses unknown parameters in one line

    text: list[Text] = Field([], description="texts that are searched for", max_length=_MAX_PARTS)
    unwanted: list[Text] = Field(
        [], alias="not", description="texts that are not wanted", max_length=_MAX_PARTS
    )
    like: list[Text] = Field([], description="ids of results that are searched for", max_length=_MAX_PARTS)
    unlike: list[Text] = Field([], description="ids of results that are not wanted", max_length=_MAX_PARTS)
    where: list[Annotated[Text, StringConstraints(pattern=":")]] = Field(
        [], description="COLUMN:TEXT; the column must contain the text", max_length=_MAX_PARTS
    )
    k: int = Field(20, ge=1, le=_MOST, description="number of results")
    collection: int = Field(0, ge=0, description="number of the collection, from 0")


class Result(BaseModel):
    """One result: its rank from 1, the cosine of its embedding and the query, and its metadata."""

    rank: int
    id: str
    path: str
    source: str
    similarity: float
    thumbnail: str = Field(description="address of a JPEG; empty for texts")
    metadata: dict[str, Any]


class Results(BaseModel):
    """The results of a query, the best first, and the number of rows that were searched."""

    results: list[Result]
    rows: int


def application(collections: Sequence[Collection], *, token: str = "", hosts: Sequence[str] = ()) -> ASGIApp:
    """Build the web application.

    Args:
        collections: at least one; they are numbered from 0.
        token: if given, required as ``?token=``, a cookie that the page sets, or ``Authorization: Bearer``.
        hosts: if given, the values of the header ``Host`` that are accepted, without ports.
    """
    app = FastAPI(title="clipkit search", docs_url=None, redoc_url=None)
    computing = Semaphore(_AT_ONCE)
    source: Callable[[str], str] = TEMPLATES.globals["source"]  # type: ignore[assignment]

    @app.exception_handler(ClipkitError)
    async def user_error(_: Request, error: ClipkitError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=400)

    def chosen(index: int) -> Collection:
        if not 0 <= index < len(collections):
            raise ConfigError(f"no collection {index}: there are {len(collections)}, from 0")
        return collections[index]

    def find_row(name: str) -> tuple[Collection, Hit, Tensor]:
        """Return the collection of the result with this id, its row and embedding."""
        file_number, _, row = name.partition("-")
        if not re.fullmatch(r"[0-9]{1,4}", file_number):
            raise ConfigError(f"{printable(name, 40)!r} is not the id of a result")
        collection = chosen(int(file_number))
        try:
            return collection, *collection.embeddings.row(row)
        except EmbeddingsChanged:  # since the last query of this collection
            collection.embeddings.refresh()
            return collection, *collection.embeddings.row(row)

    def embedding(name: str, of: Collection) -> Tensor:
        """Return the embedding of a result, in another collection that of the same image."""
        collection, hit, vector = find_row(name)
        return vector if collection is of else of.embeddings.find_embedding(hit)

    def found(parts: Parts, images: Sequence[bytes] = ()) -> Results:
        for name in (parts.model_extra or {}).keys() - {"token"}:
            names = (field.alias or field_name for field_name, field in Parts.model_fields.items())
            raise ConfigError(f"unknown parameter {printable(name, 40)!r}: {nearest(name, names)}")
        collection = chosen(parts.collection)
        if not (any(text.strip() for text in parts.text) or parts.like or images):
            raise ConfigError("nothing to search for: give text, like or a file")
        with computing:
            try:
                collection.embeddings.refresh()
            except DataError as error:  # files of the server, not the query
                raise HTTPException(503, str(error)) from error
            texts = [text for text in parts.text if text.strip()]
            positive = encode_query(collection.model, texts=texts)
            with collection.weights.activate():
                positive += encode_query(collection.model, images=images)
            positive += [embedding(name, collection) for name in parts.like]
            negative = encode_query(collection.model, texts=parts.unwanted)
            negative += [embedding(name, collection) for name in parts.unlike]
            query = combine_query(positive, negative)
            filters = [(column, text) for column, _, text in (part.partition(":") for part in parts.where)]
            try:
                hits = collection.embeddings.search(query, parts.k, filters=filters)
            except EmbeddingsChanged as error:  # since they were refreshed
                raise HTTPException(503, str(error)) from error
        results = []
        for rank, hit in enumerate(hits, start=1):
            name = f"{parts.collection}-{hit.id}"
            address = f"/api/thumbnails/{name}" if collection.embeddings.has_images else ""
            results.append(Result(**asdict(hit) | {"id": name}, rank=rank, thumbnail=address))
        return Results(results=results, rows=len(collection.embeddings))

    @app.get("/api/search")
    def search(parts: Annotated[Parts, Query()]) -> Results:
        """Search for texts and for images like earlier results."""
        return found(parts)

    @app.post("/api/search")
    async def search_images(
        file: list[UploadFile], parts: Annotated[Parts, Query()], request: Request
    ) -> Results:
        """Search for uploaded images, together with the other parts of the query."""
        for name in (await request.form()).keys() - {"file"}:
            raise ConfigError(
                f"form field {printable(name, 40)!r}: only files are form fields, give it in the URL"
            )
        if len(file) > _MAX_IMAGES:
            raise ConfigError(f"expected at most {_MAX_IMAGES} files")
        images = [await upload.read() for upload in file]
        return await asyncio.to_thread(found, parts, images)

    @app.get("/api/collections")
    def listed() -> list[dict[str, Any]]:
        """List the collections: name, rows, dimension, model, and metadata columns that can be filtered."""
        return [
            {
                "name": collection.name,
                "rows": len(collection.embeddings),
                "dimension": collection.embeddings.width,
                "model": collection.model.name,
                "columns": collection.embeddings.columns,
            }
            for collection in collections
        ]

    @app.get("/api/thumbnails/{name}", response_class=Response)
    def image(name: str) -> Response:
        """Return a result's image as a JPEG."""
        _, hit, _ = find_row(name)
        return Response(
            thumbnail(hit, _SIDE),
            media_type="image/jpeg",
            headers={"Cache-Control": "private, max-age=86400"},
        )

    @app.get("/", include_in_schema=False)
    def page() -> Response:
        names = [collection.name for collection in collections]
        rows = [len(collection.embeddings) for collection in collections]
        columns = list(
            dict.fromkeys(column for collection in collections for column in collection.embeddings.columns)
        )
        html = TEMPLATES.get_template("search.html").render(names=names, rows=rows, columns=columns)
        return Response(html, media_type="text/html; charset=utf-8")

    @app.get("/favicon.ico", include_in_schema=False)
    def icon() -> Response:
        return Response(status_code=204)

    @app.get("/search.js", include_in_schema=False)
    def script() -> Response:
        return Response(source("search.js"), media_type="text/javascript")

    @app.get("/search.css", include_in_schema=False)
    def style() -> Response:
        return Response(source("page.css") + source("search.css"), media_type="text/css")

    return _Guard(app, token=token, hosts=hosts)


class _Guard:
    """Check the host, the token and the size of requests before anything reads them, and add security headers."""

    def __init__(self, app: ASGIApp, *, token: str, hosts: Sequence[str]) -> None:
        self.app = app
        self.token = token
        self.hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        token = request.query_params.get("token", "")

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = {
                    "content-security-policy": _POLICY,
                    "x-content-type-options": "nosniff",
                    "referrer-policy": "no-referrer",
                    "cross-origin-resource-policy": "same-origin",
                }
                if self.token and self._is_token(token):
                    added["set-cookie"] = f"clipkit={self.token}; HttpOnly; SameSite=Strict; Path=/"
                message["headers"] = [
                    *message["headers"], *((name.encode(), value.encode()) for name, value in added.items()),
                ]  # fmt: skip
            await send(message)

        async def refuse(status: int, why: str) -> None:
            await JSONResponse({"detail": why}, status_code=status)(scope, receive, send_with_headers)

        if self.hosts and request.url.hostname not in self.hosts:  # another site's name for this address
            await refuse(400, "unknown host")
            return
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.token and not any(map(self._is_token, (token, bearer, request.cookies.get("clipkit", "")))):
            await refuse(401, "a token is required: open the address that clipkit serve printed")
            return
        if request.method not in ("POST", "PUT", "PATCH"):
            await self.app(scope, receive, send_with_headers)
            return
        length = request.headers.get("content-length", "")  # of the body, as the protocol ensures
        if not length.isdecimal():
            await refuse(411, "the header Content-Length is required")
            return
        if int(length) > MAX_UPLOAD:
            await refuse(413, f"expected at most {MAX_UPLOAD >> 20} MiB")
            return
        until = asyncio.get_running_loop().time() + _UPLOAD_SECONDS
        complete = False

        async def receive_in_time() -> Message:
            nonlocal complete
            try:
                async with asyncio.timeout_at(None if complete else until):
                    message = await receive()
            except TimeoutError as error:
                raise HTTPException(408, f"expected the request within {_UPLOAD_SECONDS:g} s") from error
            complete = complete or not message.get("more_body", False)
            return message

        await self.app(scope, receive_in_time, send_with_headers)

    def _is_token(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self.token.encode())


def run_serve(options: ServeOptions) -> int:
    """Run the command and return its exit status."""
    folders = options.embeddings
    models = options.model or ("",)
    if len(models) not in (1, len(folders)):
        raise ConfigError(
            f"{len(models)} models for {counted(len(folders), 'folder')}: give one --model for each"
        )
    models = models * len(folders) if len(models) == 1 else models
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listening = socket.create_server((options.host, options.port), family=family)
    except OSError as error:
        where = f"{options.host} port {options.port}"
        cause = str(error.strerror or error).partition(" (while")[0]  # which repeats the address
        raise ConfigError(f"cannot listen on {where}: {cause}; choose another --port or --host") from error
    with listening:
        collections = []
        for folder, name in zip(folders, models, strict=True):
            embeddings = Embeddings(folder, exact=options.exact)
            if note := stale_note(embeddings):
                print(note, file=sys.stderr)
            model = load_model(embeddings, options, name)
            collections.append(Collection(name=folder.resolve().name, embeddings=embeddings, model=model))
        local = _is_local(options.host)
        token = "" if local else options.token or secrets.token_urlsafe(24)
        hosts = ("127.0.0.1", "localhost", "::1") if local else ()
        config = uvicorn.Config(
            application(collections, token=token, hosts=hosts),
            host=options.host,
            port=options.port,
            log_level="warning",
            timeout_keep_alive=10,
            server_header=False,
        )
        # requests wait until the server has started
        host, port = listening.getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        print(f"serving http://{name}:{port}/{f'?token={token}' if token else ''} (Ctrl-C ends)", flush=True)
        uvicorn.Server(config).run([listening])
    return 0


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
