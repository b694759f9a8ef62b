from ingress_server import *


def test_smoke(start):
    s = start()
    c = s.client()
    r = c.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello"}])
    print(r.model_dump_json())
    for e in c.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        stream=True,
        stream_options={"include_usage": True},
    ):
        print(e.model_dump_json(exclude_none=True))
    print(c.completions.create(model=MODEL, prompt=["hello", "there"], max_tokens=3))
    for e in c.completions.create(
        model=MODEL, prompt="hello", max_tokens=3, stream=True, stream_options={"include_usage": True}
    ):
        print(e.model_dump_json(exclude_none=True))
    h = s.http()
    for m, p in [
        ("GET", "/v1/models"),
        ("GET", "/nope"),
        ("GET", "/v1/completions"),
        ("GET", "/health"),
        ("GET", "/metrics"),
        ("GET", "/api/v1/kv/lookup?text=hello"),
        ("GET", "/api/v1/kv/lookup"),
        ("GET", "/api/v1/kv/stats"),
    ]:
        r = h.request(m, p)
        print(m, p, r.status_code, r.headers.get("content-type"), r.text[:600])
    print(h.post("/tokenize", json={"prompt": "hello"}).text, h.post("/detokenize", json={"tokens": [1, 5, 300]}).text)
    print(
        h.post("/api/v1/kv/clear", json={"tiers": ["device", "cpu"]}).text,
        h.post("/api/v1/kv/clear", json={"tiers": ["x"]}).text,
    )
