"""Images from files: in process and over HTTP, as patches that the original's processor makes."""

import asyncio
import struct
import threading
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from PIL import Image as Pillow
from transformers import PreTrainedTokenizerFast

from diffray import DiffusionLLM
from diffray.cluster.api.prompts import RemoteImages
from diffray.cluster.api.settings import ApiSettings
from diffray.cluster.frontend.image_files import place_images, read_image
from diffray.components.config import InvalidField
from diffray.components.image import Sight
from tests.helpers.api_server import Served, serve_model
from tests.helpers.files_server import files_server
from tests.helpers.tiny import tiny_checkpoint

GEMMA = Sight(258880, 255999, 258882, patch=768, pool=3, most=1024, places=10240)
IMAGE_TOKEN = "word508"
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}word508{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
OPTIONS: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "seed": 7, "ignore_eos": True}


def noise(width: int, height: int, mode: str = "RGB") -> Pillow.Image:
    made = torch.Generator().manual_seed(width * 1000 + height)
    numbers = torch.randint(0, 256, (height, width, 3), generator=made, dtype=torch.uint8)
    return Pillow.frombytes("RGB", (width, height), numbers.numpy().tobytes()).convert(mode)


def file_of(image: Pillow.Image, form: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{b64encode(data).decode()}"


@pytest.fixture(scope="module")
def original() -> Callable[..., Any]:
    # Not at the top: it imports triton, and the kernels' tests choose its interpreter before that.
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    return Gemma4ImageProcessorPil()


@pytest.mark.parametrize(
    "size", [(640, 480), (97, 1203), (2000, 300), (16, 16), (3000, 20), (5, 900)]
)
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P"])
def test_patches_are_those_of_the_original_s_processor(
    original: Callable[..., Any], size: tuple[int, int], mode: str
) -> None:
    image = noise(*size, mode)
    found = read_image(file_of(image), GEMMA)
    patches = torch.frombuffer(bytearray(found.pixels), dtype=torch.float32).view(-1, 768)
    made = original(image.convert("RGB"), return_tensors="pt")
    places = made["image_position_ids"][0]
    shown = places[:, 0] >= 0
    assert torch.equal(patches, made["pixel_values"][0][shown].float())
    assert found.columns == int(places[shown][:, 0].max()) + 1


def test_an_image_is_shown_upright() -> None:
    image = noise(60, 30)
    exif = Pillow.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    turned = file_of(image, exif=exif)
    upright = image.transpose(Pillow.Transpose.ROTATE_270)
    assert read_image(turned, GEMMA) == read_image(upright, GEMMA) != read_image(image, GEMMA)


def bomb(width: int, height: int) -> bytes:
    """Return a small PNG whose header promises so many pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(100_000))), (b"IEND", b"")]
    chunks = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


BAD = [
    (b"no image", "not a PNG, JPEG, WebP or GIF"),
    (b"", "not a PNG, JPEG, WebP or GIF"),
    (file_of(noise(64, 64), "BMP"), "not a PNG, JPEG, WebP or GIF"),
    (file_of(noise(64, 64))[:-3000], "cannot be decoded"),
    (bomb(10_000, 10_000), "10000 x 10000 pixels; send at most 25000000"),
    (bomb(60_000, 60_000), "cannot be decoded"),
]


def test_few_images_are_decoded_at_once_beside_the_event_loop() -> None:
    """Threads are started as they are needed, so there are as many as images at once."""
    url, turns = data_url(file_of(Pillow.new("RGB", (3000, 2000), "red"))), 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += 1

    async def decode() -> None:
        before = set(threading.enumerate())
        counting = asyncio.create_task(count_turns())
        images = RemoteImages()
        found = await asyncio.gather(*(images.image(url, GEMMA) for _ in range(6)))
        counting.cancel()
        # A thread that has just finished may not be idle yet, so now and then there is one more.
        assert len(set(found)) == 1 and len(set(threading.enumerate()) - before) < 5

    asyncio.run(decode())
    assert turns > 20  # decoding takes some tenths of a second


def test_images_and_their_tokens_belong_together(tmp_path: Path) -> None:
    image = read_image(noise(48, 48), GEMMA)
    ids, (placed,) = place_images([5, 258880, 6], [image], GEMMA)
    soft = ids.count(258880)
    assert ids == (5, 255999, *[258880] * soft, 258882, 6) and placed.start == 2
    for given in ([5, 6], [258880, 258880]):
        with pytest.raises(InvalidField, match="give one for each"):
            place_images(given, [image], GEMMA)
    with pytest.raises(InvalidField, match="takes no images"):
        place_images([5], [image], None)
    with pytest.raises(InvalidField, match="not a PNG"):
        read_image(b"no image", GEMMA)
    with pytest.raises(ValueError, match=r"cannot read the image .*none\.png"):
        read_image(tmp_path / "none.png", GEMMA)


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[str]:
    """Another server, which has two images."""
    files = {"/image.png": file_of(noise(40, 25)), "/text.png": b"no image"}
    with files_server(files) as url:
        yield url


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, elsewhere: str) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    model = tiny_checkpoint(folder, "diffusion_gemma", TEMPLATE)
    fast = PreTrainedTokenizerFast.from_pretrained(model)
    fast.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN]})
    fast.mask_token = None
    fast.save_pretrained(model)
    settings = ApiSettings(allowed_media_domains=(elsewhere.removeprefix("http://"),))
    with serve_model(model, "gemma", settings) as served:
        yield served


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts]}]


@pytest.mark.slow
def test_all_ways_to_show_an_image_give_one_answer(
    served: Served, elsewhere: str, tmp_path: Path
) -> None:
    image, path = noise(40, 25), tmp_path / "image.png"
    path.write_bytes(file_of(image))

    def chat(shown: dict[str, Any]) -> list[dict[str, Any]]:
        return user({"type": "text", "text": "What "}, shown, {"type": "text", "text": " is it?"})

    llm, by_url = served.llm, chat(part(data_url(path.read_bytes())))
    ways = [path, str(path), path.read_bytes(), image, noise(25, 40)]
    found = [llm.chat(chat({"type": "image", "image": way}), **OPTIONS)[0] for way in ways]
    changed = found.pop()
    found += llm.chat(by_url, **OPTIONS)
    found += llm.generate([f"What {IMAGE_TOKEN} is it?"], images=[[image]], **OPTIONS)
    answers = {tuple(output.outputs[0].token_ids) for output in found}
    prompts = {tuple(output.prompt_token_ids) for output in found}
    assert len(answers) == len(prompts) == 1
    assert tuple(changed.outputs[0].token_ids) not in answers
    (prompt,) = prompts
    with httpx2.Client(base_url=served.url, timeout=120) as http:
        body = OPTIONS | {"return_token_ids": True}
        for shown in (by_url, chat(part(f"{elsewhere}/image.png"))):
            answer = http.post("/v1/chat/completions", json=body | {"messages": shown}).json()
            assert tuple(answer["choices"][0]["token_ids"]) in answers
            assert answer["usage"]["prompt_tokens"] == len(prompt)
        counted = http.post("/tokenize", json={"messages": by_url}).json()
        assert counted["tokens"] == [*prompt]
        answer = http.post("/v1/chat/completions", json=body | {"messages": by_url * 2}).json()
        assert answer["usage"]["prompt_tokens"] == 2 * len(prompt)


def input_image(url: str) -> dict[str, Any]:
    return {"type": "input_image", "detail": "auto", "image_url": url}


def test_a_wrong_image_is_one_400_in_the_words_of_each_api(served: Served, elsewhere: str) -> None:
    wrong = [(data_url(data), message) for data, message in BAD]
    wrong += [
        ("https://example.com/cat.png", "--allowed-media-domains"),
        ("data:image/png;base64,%%%", "not base64"),
        (f"{elsewhere}/text.png", "not a PNG, JPEG, WebP or GIF"),
    ]
    with httpx2.Client(base_url=served.url, timeout=120) as http:

        def refused(path: str, **body: Any) -> dict[str, Any]:
            answer = http.post(path, json=body)
            assert answer.status_code == 400, answer.text
            error: dict[str, Any] = answer.json()["error"]
            return error

        for url, message in wrong:
            error = refused("/v1/chat/completions", messages=user(part(url)))
            assert message in error["message"] and error["param"] == "messages"
            error = refused("/v1/responses", input=user(input_image(url)))
            assert message in error["message"] and error["param"] == "input"
            if url.startswith("http"):
                block = {"type": "image", "source": {"type": "url", "url": url}}
                error = refused("/v1/messages", max_tokens=4, messages=user(block))
                assert message in error["message"] and error.keys() == {"type", "message"}
        many = [part(data_url(file_of(noise(8, 8))))] * 17
        error = refused("/v1/chat/completions", messages=user(*many))
        assert "at most 16 images" in error["message"]


def test_a_conversation_in_process_is_checked_as_well() -> None:
    llm = DiffusionLLM("demo")
    with pytest.raises(ValueError, match="takes no images"):
        llm.chat(user({"type": "image", "image": noise(8, 8)}))
    for content in ([{"type": "video"}], [], [{"type": "text"}]):
        with pytest.raises(ValueError, match="'content', which is a text or a list of"):
            llm.chat([{"role": "user", "content": content}])
