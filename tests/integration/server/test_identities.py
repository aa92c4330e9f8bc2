"""Operators without tokens: ID tokens of a real OpenID provider, and client certificates."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import grpc
import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.hashes import SHA256
from joserfc import jwt
from joserfc.jwk import OctKey, RSAKey

from tests.integration.server.test_api import Api
from tests.support.center import RunningCenter
from tests.support.certificates import Authority
from tests.support.console import Browser, browser
from tests.support.oidc import ANN, CLIENT, STRANGER, id_token, provider
from tmc_common.protocol import admin_pb2
from tmc_console.sso_names import Provider as ConsoleProvider
from tmc_server.identity import oidc
from tmc_storm.eventually import eventually

REFUSED = ("UNAUTHENTICATED", "ADMIN_ONLY", "")
ISSUER = "https://login.example.com"


@pytest.fixture(scope="module")
def issuer() -> Iterator[str]:
    with provider() as url:
        yield url


@pytest.fixture(scope="module")
def center(tmp_path_factory: pytest.TempPathFactory, issuer: str) -> Iterator[RunningCenter]:
    folder = tmp_path_factory.mktemp("identities")
    sections = {"oidc": {"issuer": issuer, "audiences": [CLIENT], "claim": "email"}}
    with RunningCenter(f"sqlite:///{folder}/tmc.db", **sections) as running:
        yield running


@pytest.fixture(scope="module")
def api(center: RunningCenter) -> Iterator[Api]:
    with grpc.insecure_channel(center.address) as channel:
        made = Api(center, channel)
        _register(made, "ann", f"oidc:{ANN}")
        yield made


def _register(api: Api, name: str, *identities: str, **more: Any) -> Any:
    fields = {"role": admin_pb2.ROLE_OPERATOR, "without_token": True, "reason": "test"} | more
    return api(
        "AdminService/RegisterOperator", admin_pb2.RegisterOperatorRequest(name=name, identities=identities, **fields)
    )


def _who(api: Api, token: str) -> Any:
    answer = api("AdminService/WhoAmI", b"", [("authorization", f"Bearer {token}")])
    return answer if isinstance(answer, tuple) else answer.name


class TestOpenId:
    def test_an_id_token_identifies_a_registered_operator(self, api: Api, issuer: str) -> None:
        token = id_token(issuer, ANN)
        assert eventually(lambda: _who(api, token) == "ann")
        me = api("AdminService/WhoAmI", b"", [("authorization", f"Bearer {token}")])
        assert (me.role, list(me.identities)) == (admin_pb2.ROLE_OPERATOR, [f"oidc:{ANN}"])

    def test_a_person_whom_nobody_registered_has_no_rights(self, api: Api, issuer: str) -> None:
        eventually(lambda: _who(api, id_token(issuer, ANN)) == "ann")
        assert _who(api, id_token(issuer, STRANGER)) == REFUSED

    def test_a_token_for_another_program_is_refused(self, api: Api, issuer: str) -> None:
        eventually(lambda: _who(api, id_token(issuer, ANN)) == "ann")
        assert _who(api, id_token(issuer, ANN, client="another")) == REFUSED

    def test_without_an_identity_there_is_a_token(self, api: Api) -> None:
        assert _register(api, "nobody") == ("INVALID_ARGUMENT", "FIELD_INVALID", "identities")
        assert _register(api, "both", "oidc:both@example.com", without_token=False).token

    def test_an_operator_without_a_token_got_none(self, api: Api) -> None:
        assert _register(api, "quiet", "oidc:quiet@example.com").token == ""
        listed = api("AdminService/ListOperators", admin_pb2.ListOperatorsRequest()).operators
        (quiet,) = [each for each in listed if each.name == "quiet"]
        assert 0 < quiet.expires_ms <= time.time() * 1000

    @pytest.mark.parametrize("identity", ["ann@example.com", "oidc:", "ldap:ann", "oidc:" + "x" * 100, "oidc:a\nb"])
    def test_an_identity_has_a_kind_and_a_name(self, api: Api, identity: str) -> None:
        assert _register(api, "wrong", identity) == ("INVALID_ARGUMENT", "FIELD_INVALID", "identities")

    def test_an_identity_belongs_to_one_operator(self, api: Api) -> None:
        assert _register(api, "ann2", f"oidc:{ANN}") == ("ALREADY_EXISTS", "NAME_TAKEN", "")
        _register(api, "other", "oidc:other@example.com")
        update = admin_pb2.UpdateOperatorRequest(name="other", identities=[f"oidc:{ANN}"], reason="theft")
        update.update_mask.paths.append("identities")
        assert api("AdminService/UpdateOperator", update) == ("ALREADY_EXISTS", "NAME_TAKEN", "")

    def test_a_change_of_identities_counts_at_once(self, api: Api, issuer: str) -> None:
        token = id_token(issuer, ANN)
        eventually(lambda: _who(api, token) == "ann")
        update = admin_pb2.UpdateOperatorRequest(name="ann", reason="left")
        update.update_mask.paths.append("identities")
        api("AdminService/UpdateOperator", update)
        assert _who(api, token) == REFUSED
        update.identities.append(f"oidc:{ANN}")
        api("AdminService/UpdateOperator", update)
        assert _who(api, token) == "ann"

    def test_the_tokens_of_an_operator_can_be_ended(self, api: Api) -> None:
        token = _register(api, "tokens", "oidc:tokens@example.com", without_token=False).token
        assert _who(api, token) == "tokens"
        api(
            "AdminService/UpdateOperator",
            admin_pb2.UpdateOperatorRequest(name="tokens", without_token=True, reason="sso"),
        )
        assert _who(api, token) == REFUSED
        rows = api("AdminService/ListAudit", admin_pb2.ListAuditRequest(action="update operator")).entries
        assert rows[0].change == "tokens: ended"
        last = admin_pb2.UpdateOperatorRequest(name="admin", without_token=True, reason="sso")
        assert api("AdminService/UpdateOperator", last)[1] == "FIELD_INVALID"

    def test_without_a_token_there_is_none_to_replace(self, api: Api, issuer: str) -> None:
        eventually(lambda: _who(api, id_token(issuer, ANN)) == "ann")
        proof = [("authorization", f"Bearer {id_token(issuer, ANN)}")]
        own = admin_pb2.RotateOperatorTokenRequest(reason="mine")
        assert api("AdminService/RotateOperatorToken", own, proof) == ("PERMISSION_DENIED", "ROLE_REQUIRED", "")

    def test_a_name_is_no_token(self, api: Api) -> None:
        for text in (f"oidc:{ANN}", ANN, "a.b.c", ""):
            assert _who(api, text) == REFUSED


class _Sent(httpx.SyncByteStream):
    """A body that was not read yet."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def __iter__(self) -> Iterator[bytes]:
        yield self._body


class Signed:
    """Tokens of a provider that a test makes itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, claim: str = "email") -> None:
        self.now, self.wakes = 1_000_000.0, 0
        self.key = RSAKey.generate_key(2048, {"kid": "one"})
        self.published: list[Mapping[str, Any]] = [self.key.as_dict(private=False)]
        pages = {
            f"{ISSUER}/.well-known/openid-configuration": lambda: {"issuer": ISSUER, "jwks_uri": f"{ISSUER}/keys"},
            f"{ISSUER}/keys": lambda: {"keys": self.published},
        }

        @contextmanager
        def stream(method: str, url: str, timeout: float, headers: Any) -> Iterator[httpx.Response]:
            assert timeout
            sent = _Sent(json.dumps(pages[url]()).encode())
            yield httpx.Response(200, stream=sent, request=httpx.Request(method, url))

        monkeypatch.setattr(httpx, "stream", stream)
        self.tokens = oidc.OidcTokens(
            oidc.Provider(issuer=ISSUER, audiences=[CLIENT], claim=claim), lambda: self.now, lambda: self.now
        )
        self.tokens.wake = self._woken
        self.tokens.refresh()

    def _woken(self) -> None:
        self.wakes += 1

    def token(self, key: Any = None, header: Mapping[str, str] | None = None, **claims: Any) -> str:
        whole = {
            "iss": ISSUER,
            "aud": CLIENT,
            "sub": "1",
            "email": ANN,
            "email_verified": True,
            "exp": int(self.now) + 60,
        }
        found = {name: value for name, value in (whole | claims).items() if value is not None}
        return jwt.encode(header or {"alg": "RS256", "kid": "one"}, found, key or self.key)

    def name_of(self, **claims: Any) -> str | None:
        return self.tokens.name_of(self.token(**claims))


class TestVerification:
    @pytest.fixture
    def signed(self, monkeypatch: pytest.MonkeyPatch) -> Signed:
        return Signed(monkeypatch)

    def test_a_token_counts_until_it_expires(self, signed: Signed) -> None:
        token = signed.token()
        assert signed.tokens.name_of(token) == ANN
        signed.now += 59
        assert signed.tokens.name_of(token) == ANN
        signed.now += 2
        assert signed.tokens.name_of(token) is None

    @pytest.mark.parametrize(
        "claims",
        [
            {"iss": "https://evil.example"},
            {"iss": None},
            {"aud": "another"},
            {"aud": None},
            {"exp": 1},
            {"exp": None},
            {"email": None},
            {"email": ""},
            {"email": 7},
            {"email_verified": False},
            {"email_verified": None},
            {"nbf": 9_999_999_999},
            {"azp": "another"},
            {"events": {"http://schemas.openid.net/event/backchannel-logout": {}}},
        ],
        ids=str,
    )
    def test_what_is_missing_or_wrong_refuses_it(self, signed: Signed, claims: dict[str, Any]) -> None:
        assert signed.name_of() == ANN
        assert signed.name_of(**claims) is None

    @pytest.mark.parametrize(
        "header",
        [
            {"crit": 1},
            {"crit": ["x"]},
            {"kid": 7},
            {"typ": "at+jwt"},
            {"typ": "logout+jwt"},
            {"alg": 5},
            {"b64": False},
        ],
    )
    def test_an_odd_header_refuses_it(self, signed: Signed, header: dict[str, Any]) -> None:
        _, body, signature = signed.token().split(".")
        whole = json.dumps({"alg": "RS256", "kid": "one"} | header).encode()
        head = base64.urlsafe_b64encode(whole).rstrip(b"=")
        message = head + b"." + body.encode()
        made = signed.key.private_key.sign(message, PKCS1v15(), SHA256())
        assert (
            signed.tokens.name_of(f"{message.decode()}.{base64.urlsafe_b64encode(made).rstrip(b'=').decode()}") is None
        )
        assert signed.tokens.name_of(f"{head.decode()}.{body}.{signature}") is None

    def test_the_clock_of_the_provider_may_be_ahead(self, signed: Signed) -> None:
        ahead = int(signed.now) + 30
        assert signed.name_of(iat=ahead, nbf=ahead) == ANN
        assert signed.name_of(nbf=ahead + 600) is None

    def test_keys_that_are_not_understood_are_ignored(self, signed: Signed) -> None:
        odd = [{"kty": "EC", "crv": "P-999", "x": "", "y": ""}, {"kty": "OKP", "crv": "BLS"}, {"kty": "RSA"}, {}, "key"]
        signed.published = [*odd, *signed.published]
        signed.tokens.refresh()
        assert signed.name_of() == ANN

    def test_one_of_several_audiences_is_enough(self, signed: Signed) -> None:
        assert signed.name_of(aud=["another", CLIENT]) == ANN

    def test_another_key_none_and_a_shared_secret_are_refused(self, signed: Signed) -> None:
        other = RSAKey.generate_key(2048, {"kid": "one"})
        assert signed.tokens.name_of(signed.token(key=other)) is None
        head, body, _ = signed.token().split(".")
        unsigned = "eyJhbGciOiJub25lIn0"  # {"alg":"none"}
        assert signed.tokens.name_of(f"{unsigned}.{body}.") is None
        assert signed.tokens.name_of(f"{head}.{body}.") is None
        secret = OctKey.import_key("s3cret-s3cret-s3cret-s3cret-s3cret")
        claims = {"iss": ISSUER, "aud": CLIENT, "email": ANN, "email_verified": True, "exp": int(signed.now) + 60}
        forged = jwt.encode({"alg": "HS256", "kid": "one"}, claims, secret)
        assert signed.tokens.name_of(forged) is None
        signed.published.append(secret.as_dict() | {"kid": "one"})
        signed.tokens.refresh()
        assert signed.tokens.name_of(forged) is None

    def test_new_keys_are_asked_for_but_not_for_every_bad_token(self, signed: Signed) -> None:
        new = RSAKey.generate_key(2048, {"kid": "two"})
        token = signed.token(key=new, header={"alg": "RS256", "kid": "two"})
        for _ in range(5):
            assert signed.tokens.name_of(token) is None
        assert signed.wakes == 1
        signed.published = [new.as_dict(private=False)]
        signed.tokens.refresh()
        assert signed.tokens.name_of(token) == ANN
        signed.now += 11
        signed.tokens.name_of("a.b.c")
        assert signed.wakes == 2

    def test_a_provider_that_is_away_keeps_its_keys(self, signed: Signed, monkeypatch: pytest.MonkeyPatch) -> None:
        def away(*_: Any, **__: Any) -> Any:
            raise httpx.ConnectError("gone")

        monkeypatch.setattr(httpx, "stream", away)
        with pytest.raises(OSError, match="does not publish its keys"):
            signed.tokens.refresh()
        assert signed.name_of() == ANN

    def test_another_claim_may_name_the_operator(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert Signed(monkeypatch, claim="sub").name_of(email_verified=False) == "1"


class TestCertificates:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return tmp_path

    @pytest.fixture
    def secured(self, folder: Path) -> Iterator[RunningCenter]:
        authority = Authority(folder)
        certificate, key = authority.issue("center", "DNS:localhost")
        for name, alternative in (
            ("ann", "DNS:ann.test"),
            ("bob", "DNS:bob.test"),
            ("two", "DNS:ann.test,DNS:both.test"),
        ):
            authority.issue(name, alternative)
        tls = {"certificate": str(certificate), "key": str(key), "client_authority": str(authority.certificate)}
        url = f"sqlite:///{folder}/tmc.db"
        with RunningCenter(url) as plain, grpc.insecure_channel(plain.address) as channel:
            for name in ("ann", "both"):
                _register(Api(plain, channel), name, f"certificate:{name}.test")
        with RunningCenter(url, registered=(plain.keys, plain.token), tls=tls) as running:
            yield running

    def _api(self, center: RunningCenter, folder: Path, name: str) -> tuple[grpc.Channel, Api]:
        read = [(folder / file).read_bytes() for file in ("ca.pem", f"{name}.key", f"{name}.pem")]
        port = center.address.rpartition(":")[2]
        channel = grpc.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(*read))
        return channel, Api(center, channel)

    def test_a_certificate_identifies_a_registered_operator(self, secured: RunningCenter, folder: Path) -> None:
        found = {}
        channel, ann = self._api(secured, folder, "ann")
        with channel:
            found["ann"] = ann("AdminService/WhoAmI", b"", []).name
            found["wrong token"] = ann("AdminService/WhoAmI", b"", [("authorization", "Bearer wrong")])
            found["empty token"] = ann("AdminService/WhoAmI", b"", [("authorization", "Bearer ")])
        for name in ("bob", "two"):
            channel, api = self._api(secured, folder, name)
            with channel:
                found[name] = api("AdminService/WhoAmI", b"", [])
        assert found == {
            "ann": "ann",
            "wrong token": REFUSED,
            "empty token": REFUSED,
            "bob": REFUSED,
            "two": REFUSED,  # two operators at once
        }

    def test_without_tls_a_name_proves_nothing(self, api: Api) -> None:
        _register(api, "certified", "certificate:certified.test")
        assert api("AdminService/WhoAmI", b"", [("x-forwarded-client-cert", "certified.test")]) == REFUSED


class TestConsole:
    @pytest.fixture
    def guest(self, center: RunningCenter, api: Api, issuer: str) -> Iterator[Browser]:
        with browser(center, provider=ConsoleProvider(issuer=issuer, client_id=CLIENT, secret="s3cret")) as made:
            eventually(lambda: _who(api, id_token(issuer, ANN)) == "ann")
            yield made

    def _to_the_provider(self, guest: Browser, subject: str, next_path: str = "/topics") -> str:
        """Begin a login, and log in there. Returns: where the provider sends the browser."""
        begun = guest.get(f"/login/sso?next={next_path}", follow_redirects=False)
        assert begun.status_code == 303
        with httpx.Client() as client:
            answer = client.post(begun.headers["location"], data={"sub": subject})
        assert answer.status_code in (302, 303)
        back = urlsplit(answer.headers["location"])
        assert back.path == "/login/sso/back"
        return f"{back.path}?{back.query}"

    def test_from_the_login_page_to_a_session(self, guest: Browser) -> None:
        assert 'href="/login/sso?next=/topics"' in guest.get("/topics").text
        back = self._to_the_provider(guest, ANN)
        onward = guest.get(back, follow_redirects=False)
        assert (onward.status_code, 'content="0; url=/topics"' in onward.text) == (200, True)
        assert (
            "SameSite=strict" in onward.headers["set-cookie"]
            or "samesite=strict" in onward.headers["set-cookie"].lower()
        )
        assert "ann" in guest.get("/topics").text

    def test_a_stranger_gets_no_session(self, guest: Browser) -> None:
        answer = guest.get(self._to_the_provider(guest, STRANGER))
        assert (answer.status_code, "unknown identity" in answer.text) == (401, True)
        assert guest.get("/topics", follow_redirects=False).status_code == 303

    def test_a_login_that_another_browser_began_is_refused(self, guest: Browser) -> None:
        back = self._to_the_provider(guest, ANN)
        guest.cookies.clear()
        answer = guest.get(back)
        assert (answer.status_code, "not begun in this browser" in answer.text) == (403, True)

    def test_a_login_counts_once(self, guest: Browser) -> None:
        back = self._to_the_provider(guest, ANN)
        assert guest.get(back).status_code == 200
        assert guest.get(back).status_code == 403

    @pytest.mark.parametrize("query", ["", "state=x&code=y", "error=access_denied&state=x"])
    def test_what_nobody_began_is_refused(self, guest: Browser, query: str) -> None:
        assert guest.get(f"/login/sso/back?{query}").status_code == 403

    def test_it_asks_for_a_code_with_pkce_and_a_nonce(self, guest: Browser) -> None:
        location = guest.get("/login/sso", follow_redirects=False).headers["location"]
        asked = {name: values[0] for name, values in parse_qs(urlsplit(location).query).items()}
        assert (asked["response_type"], asked["code_challenge_method"]) == ("code", "S256")
        assert min(len(asked[name]) for name in ("state", "nonce", "code_challenge")) >= 43
        again = guest.get("/login/sso", follow_redirects=False).headers["location"]
        assert not set(asked.values()) & {asked["state"]} & set(parse_qs(urlsplit(again).query)["state"])

    @pytest.mark.parametrize("next_path", ["//evil.example", "https://evil.example", "/\\evil.example"])
    def test_it_leads_to_no_other_site(self, guest: Browser, next_path: str) -> None:
        onward = guest.get(self._to_the_provider(guest, ANN, next_path), follow_redirects=False)
        assert 'content="0; url=/"' in onward.text

    def test_without_a_provider_there_is_no_such_page(self, center: RunningCenter) -> None:
        with browser(center) as plain:
            assert "/login/sso" not in plain.get("/login").text
            assert plain.get("/login/sso").status_code == plain.get("/login/sso/back?state=x").status_code == 404
