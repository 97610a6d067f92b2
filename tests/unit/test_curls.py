"""What the docs' tests read out of `grpcurl` and `buf curl` commands."""

from __future__ import annotations

import pytest

from support.curls import assert_same_calls, calls_in, told_with

GENERATE = "tokentape.v1.GenerationService/Generate"
GRPCURL = f"""\
grpcurl -plaintext -d '{{"prompt_token_ids": [1, 2]}}' \\
  127.0.0.1:50051 {GENERATE}
"""
BUF = f"""\
buf curl --protocol grpc --http2-prior-knowledge \\
  -d '{{"prompt_token_ids":  [1,2]}}' http://127.0.0.1:50051/{GENERATE}
"""


def test_the_same_call_in_both_tools() -> None:
    (call,) = assert_same_calls(GRPCURL, BUF)
    assert (call.address, call.tls, call.method) == ("127.0.0.1:50051", False, GENERATE)
    assert call.data == {"prompt_token_ids": [1, 2]}


@pytest.mark.parametrize(
    "changed",
    [
        BUF.replace("/Generate", "/Abort"),
        BUF.replace("[1,2]", "[1,3]"),
        BUF.replace("50051", "50052"),
        BUF.replace("http://", "https://"),
        BUF.replace("-d", "-H 'authorization: Bearer x' -d"),
        BUF + BUF,
        "",
    ],
)
def test_another_call_is_noticed(changed: str) -> None:
    assert changed != BUF
    with pytest.raises(AssertionError):
        assert_same_calls(GRPCURL, changed)


def test_sockets_headers_and_files() -> None:
    text = """\
ANSWER=$(grpcurl -cacert out/ca.pem -cert a.pem -key a.key -expand-headers -H 'Authorization: Bearer ${TOKEN}' \\
  localhost:50051 list)
buf curl --protocol grpc --cacert out/ca.pem --cert a.pem --key=a.key -H "authorization: Bearer $TOKEN" \\
  --list-services https://localhost:50051 | sort
grpcurl -plaintext -unix /run/control.sock tokentape.v1.ControlService.Sleep
buf curl --protocol grpc --http2-prior-knowledge --unix-socket /run/control.sock \\
  http://localhost/tokentape.v1.ControlService/Sleep
"""
    listing, sleep = assert_same_calls(text)
    assert listing.headers == ("authorization: Bearer $TOKEN",)
    assert listing.files == (("cacert", "out/ca.pem"), ("cert", "a.pem"), ("key", "a.key"))
    assert listing.tls
    assert sleep.address == "unix:/run/control.sock"


def test_a_request_on_standard_input() -> None:
    text = """\
grpcurl -plaintext -d @ h:1 a.B/C <<EOF
{"reader_token": "$READER"}
EOF
buf curl --protocol grpc --http2-prior-knowledge -d @- http://h:1/a.B/C <<< '{"reader_token":"$READER"}'
"""
    (call,) = assert_same_calls(text)
    assert call.data == {"reader_token": "$READER"}


def test_one_tools_commands_are_left_out() -> None:
    mixed = f"TAPE=main.1\n{GRPCURL}{BUF}echo done\n"
    assert told_with("buf", [mixed]) == [f"TAPE=main.1\n{BUF}echo done\n"]
    assert told_with("grpcurl", [mixed]) == [f"TAPE=main.1\n{GRPCURL}echo done\n"]
    assert told_with("buf", [GRPCURL]) == []


def test_a_substitution_over_several_lines_is_one_command() -> None:
    text = f"READER=$({GRPCURL.rstrip()} |\n  sed 's/x/y/')\n{BUF}echo $READER\n"
    assert told_with("buf", [text]) == [f"{BUF}echo $READER\n"]
    assert told_with("grpcurl", [text]) == [text.replace(BUF, "")]


def test_a_block_of_the_other_tool_is_left_out_with_all_that_goes_with_it() -> None:
    assert told_with("buf", [f"{GRPCURL}WATCHER=$!\n", "wait\n"]) == ["wait\n"]


def test_an_option_that_is_not_compared_is_an_error() -> None:
    with pytest.raises(AssertionError, match="max-time"):
        calls_in("grpcurl -plaintext -max-time 5 h:1 a.B/C")
