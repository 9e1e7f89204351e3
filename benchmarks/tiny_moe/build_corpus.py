"""The corpus of the tiny model: texts of Debian packages as tokens, by domain, with documents held out.

    python benchmarks/tiny_moe/build_corpus.py --work DIR --out DIR

Fetches the packages with `apt-get download` where DIR has none, unpacks them, cleans their texts, trains a byte-level
BPE and writes `tokenizer.json`, `corpus.json` (domains, documents, characters, tokens, licences), and `train.xz` and
`held.xz`: 16-bit tokens, document after document, domain after domain, each document ended by token 0.
"""

import argparse
import hashlib
import json
import lzma
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from clean_text import from_dictd, from_html, from_pod, from_roff, from_rst, from_sword, unpacked
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
SHARE = "usr/share"
DICTS = f"{SHARE}/dictd"
# domain: (most characters taken, [(package, folder and pattern, how it is cleaned)])
DOMAINS = {
    "essays": (14e6, [("anarchism", f"{SHARE}/doc/anarchism/html/*.html", from_html)]),
    "dictionary": (30e6, [("dict-gcide", f"{DICTS}/gcide.dict.dz", from_dictd)]),
    "scripture": (6e6, [("sword-text-kjv", f"{SHARE}/sword/modules/texts/ztext/engKJV2006eb/*.bzs", from_sword)]),
    "kernel": (22e6, [("linux-doc-6.1", f"{SHARE}/doc/linux-doc-6.1/html/_sources/**/*.txt", from_rst)]),
    "python": (12e6, [("python3.11-doc", f"{SHARE}/doc/python3.11/html/_sources/**/*.txt", from_rst)]),
    "perl": (9e6, [("perl-doc", f"{SHARE}/perl/*/**/*.pod", from_pod)]),
    "manuals": (
        9e6,
        [
            ("manpages", f"{SHARE}/man/man*/*.gz", from_roff),
            ("manpages-dev", f"{SHARE}/man/man*/*.gz", from_roff),
            ("git-doc", f"{SHARE}/doc/git-doc/*.html", from_html),
        ],
    ),
    "database": (12e6, [("postgresql-doc-15", f"{SHARE}/doc/postgresql-doc-15/html/*.html", from_html)]),
    "computing": (
        8e6,
        [
            ("dict-foldoc", f"{DICTS}/*.dz", from_dictd),
            ("dict-jargon", f"{DICTS}/*.dz", from_dictd),
            ("dict-devil", f"{DICTS}/*.dz", from_dictd),
        ],
    ),
    "debian": (
        8e6,
        [
            ("debian-handbook", f"{SHARE}/doc/debian-handbook/html/en-US/*.html", from_html),
            ("debian-policy", f"{SHARE}/doc/debian-policy/**/*.html", from_html),
            ("debian-reference-en", f"{SHARE}/debian-reference/*.html", from_html),
            ("developers-reference", f"{SHARE}/developers-reference/**/*.html", from_html),
            ("aptitude-doc-en", f"{SHARE}/doc/aptitude/html/en/*.html", from_html),
            ("installation-guide-amd64", f"{SHARE}/doc/installation-guide-amd64/en/*.html", from_html),
            ("maint-guide", f"{SHARE}/doc/maint-guide/**/*.html", from_html),
            ("debian-faq", f"{SHARE}/doc/debian/FAQ/**/*.html", from_html),
        ],
    ),
}


def unpacked_package(package: str, work: Path) -> Path:
    folder = work / "x" / package
    if not folder.exists():
        if not list(work.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", package], cwd=work, check=True, capture_output=True)
        folder.mkdir(parents=True)
        subprocess.run(["dpkg", "-x", str(next(work.glob(f"{package}_*.deb"))), str(folder)], check=True)
    return folder


def documents_of(domain: str, work: Path) -> Iterator[str]:
    """The documents of a domain, each once, those of less than 400 characters dropped."""
    seen = set()
    for package, pattern, clean in DOMAINS[domain][1]:
        paths = sorted(path for path in unpacked_package(package, work).glob(pattern) if path.is_file())
        if not paths:
            raise FileNotFoundError(f"package {package} has no file {pattern}")
        for path in paths:
            if clean is from_sword:
                cleaned: list[str] = from_sword(path.read_bytes(), path.with_suffix(".bzz").read_bytes())
            else:
                one_or_more = clean(unpacked(path))
                cleaned = [one_or_more] if isinstance(one_or_more, str) else one_or_more
            for text in cleaned:
                key = hashlib.sha256(text.encode()).digest()
                if len(text) >= 400 and key not in seen:
                    seen.add(key)
                    yield text


def chosen(domain: str, work: Path) -> tuple[list[str], list[str]]:
    """Documents to train on and documents held out (about 1 in 80, and one at least), by a hash of their text."""
    documents = sorted(documents_of(domain, work), key=lambda text: hashlib.sha256(text.encode()).digest())
    limit = DOMAINS[domain][0]
    taken: list[str] = []
    for text in documents:
        if limit > 0:
            taken.append(text[: int(limit)])
            limit -= len(text)
    num_held = max(1, len(taken) // 80)
    return taken[num_held:], taken[:num_held]


def trained_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator((text[:40_000] for text in texts), trainer)
    return tokenizer


def encoded(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    ids = [np.array([*encoding.ids, 0], np.uint16) for encoding in tokenizer.encode_batch_fast(texts)]
    return np.concatenate(ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="where packages are fetched and unpacked")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=6144)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    texts = {domain: chosen(domain, arguments.work) for domain in DOMAINS}
    tokenizer = trained_tokenizer([text for train, _ in texts.values() for text in train[::4]], arguments.vocab_size)
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    facts = {}
    for name, which in (("train", 0), ("held", 1)):
        arrays = {domain: encoded(tokenizer, pair[which]) for domain, pair in texts.items()}
        everything = np.concatenate(list(arrays.values()))
        (arguments.out / f"{name}.xz").write_bytes(lzma.compress(everything.astype("<u2").tobytes(), preset=6))
        facts[name] = {
            domain: {"documents": len(texts[domain][which]), "characters": sum(map(len, texts[domain][which])),
                     "tokens": len(arrays[domain])} for domain in DOMAINS
        }  # fmt: skip
    facts["packages"] = {
        domain: [next(arguments.work.glob(f"{package}_*.deb")).name for package, _, _ in sources]
        for domain, (_, sources) in DOMAINS.items()
    }
    (arguments.out / "corpus.json").write_text(json.dumps(facts, indent=1) + "\n")
    (arguments.out / "held.json").write_text(json.dumps({d: pair[1] for d, pair in texts.items()}))
    for domain, numbers in facts["train"].items():
        print(domain, numbers, facts["held"][domain])


if __name__ == "__main__":
    main()
