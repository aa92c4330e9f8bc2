"""The table of ranges nobody is sent to, compared with IANA's registries."""

from __future__ import annotations

import ipaddress

import pytest

from tmc_server.domain.egress import Egress

# IANA IPv4 Special-Purpose Address Registry (iana-ipv4-special-registry), every row, with the multicast block beside it.
IPV4 = [
    "0.0.0.0/8",
    "0.0.0.0/32",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.0.0/29",
    "192.0.0.8/32",
    "192.0.0.9/32",
    "192.0.0.10/32",
    "192.0.0.170/32",
    "192.0.0.171/32",
    "192.0.2.0/24",
    "192.31.196.0/24",
    "192.52.193.0/24",
    "192.88.99.0/24",
    "192.88.99.2/32",
    "192.168.0.0/16",
    "192.175.48.0/24",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "240.0.0.0/4",
    "255.255.255.255/32",
    "224.0.0.0/4",
]
# IANA IPv6 Special-Purpose Address Registry (iana-ipv6-special-registry), every row, with the blocks of the address space
# registry (ipv6-address-space) that are not unicast or not assigned.
IPV6 = [
    "::1/128",
    "::/128",
    "::ffff:0:0/96",
    "64:ff9b::/96",
    "64:ff9b:1::/48",
    "100::/64",
    "100:0:0:1::/64",
    "2001::/23",
    "2001::/32",
    "2001:1::1/128",
    "2001:1::2/128",
    "2001:1::3/128",
    "2001:2::/48",
    "2001:3::/32",
    "2001:4:112::/48",
    "2001:10::/28",
    "2001:20::/28",
    "2001:30::/28",
    "2001:db8::/32",
    "2002::/16",
    "2620:4f:8000::/48",
    "3fff::/20",
    "5f00::/16",
    "fc00::/7",
    "fe80::/10",
    "::/8",
    "100::/8",
    "200::/7",
    "400::/6",
    "800::/5",
    "1000::/4",
    "4000::/3",
    "6000::/3",
    "8000::/3",
    "a000::/3",
    "c000::/3",
    "e000::/4",
    "f000::/5",
    "f800::/6",
    "fe00::/9",
    "fec0::/10",
    "ff00::/8",
]
PRIVATE = {"10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"}


def permitted(address: str, *allow: str) -> bool:
    """As the address of an instance that discovery gives."""
    return Egress(allow).permits(ipaddress.ip_address(address), 80, listed=True)


@pytest.mark.parametrize("network", [*IPV4, *IPV6])
def test_special_purpose_ranges_are_refused_from_end_to_end_except_private_ones(network: str) -> None:
    of = ipaddress.ip_network(network)
    ends = {str(of[0]), str(of[of.num_addresses // 2]), str(of[-1])}
    assert {permitted(end) for end in ends} == {network in PRIVATE}


@pytest.mark.parametrize(
    "hidden",
    [
        "::127.0.0.1",
        "::ffff:10.0.0.7",
        "::ffff:0:10.0.0.7",
        "64:ff9b::10.0.0.7",
        "64:ff9b:1::7f00:1",
        "2002:7f00:1::1",
        "2001:0:7f00:1::",
        "fe80::5efe:127.0.0.1",
        "2a00::5efe:7f00:1",
        "2607:f8b0::200:5efe:127.0.0.1",
        "fd00::5efe:169.254.169.254",
        "2a00::300:5efe:10.0.0.7",
        "2a00::100:5efe:10.0.0.7",
    ],
)
def test_an_ipv4_address_inside_an_ipv6_one_is_refused(hidden: str) -> None:
    assert not permitted(hidden)


@pytest.mark.parametrize(
    "metadata",
    [
        "169.254.169.254",
        "169.254.170.2",
        "169.254.170.23",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "fd00:ec2::254",
        "fd00:ec2::23",
        "fd20:ce::254",
        "fd00:42::42",
        "fe80::a9fe:a9fe",
    ],
)
def test_metadata_services_of_clouds_are_refused(metadata: str) -> None:
    assert not permitted(metadata)


@pytest.mark.parametrize(
    "ordinary",
    [
        "10.0.0.7",
        "172.31.255.255",
        "192.168.1.1",
        "100.64.0.7",
        "1.1.1.1",
        "8.8.8.8",
        "fd12:3456::7",
        "2a00:1450::7",
        "2606:4700::1111",
        "2400::5eff:1",
        "3ffe::1",
    ],
)
def test_places_where_services_live_are_permitted(ordinary: str) -> None:
    assert permitted(ordinary)


def test_a_network_entry_permits_what_the_table_refuses() -> None:
    assert permitted("5f00::1", "5f00::/16:80")
    assert permitted("2a00::5efe:a00:7", "2a00::/16:*")
    assert not permitted("5f00::1", "5f00::/16:81")
