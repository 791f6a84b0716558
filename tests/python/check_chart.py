"""Checks the Helm chart with Helm's own code, and the manifest beside it against Kubernetes' schemas.

usage: check_chart.py CHART MANIFEST

Helm's library (in helm-python-sdk) lints and renders the chart and must refuse bad values. Kubernetes-validate must accept every object.
With its defaults the chart makes the objects of MANIFEST. Prints the servers' flags of each case as a line of JSON, then "ok". The check
needs no cluster, so it misses faults that only an API server finds, such as a missing storage class.
"""

import copy
import json
import pathlib
import sys

import helm_python
import kubernetes_validate
import yaml
from helm_python.chart import Chart, lint

VERSIONS = ["1.25", "1.34"]  # the oldest that Chart.yaml allows, and a newer one
CASES = {
    "the defaults": {},
    "everything": {
        "replicas": 3,
        "tls": {"secretName": "longshore-tls", "http": True},
        "checkpoints": {"existingClaim": "shared", "keep": 2, "onDrain": True},
        "state": {"size": "2Ti", "storageClass": "local-nvme", "resident": "16GiB"},
        "image": {"tag": "test", "pullSecrets": [{"name": "registry"}]},
        "extraArgs": ["--drive-endurance=600TB"],
        "nodeSelector": {"nvme": "yes"},
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "priorityClassName": "high",
    },
    "no network policy": {"networkPolicy": {"enabled": False}},
    "not encrypted": {"tls": {"secretName": "", "insecure": True}},
}
REFUSED = [
    ({"memroy": "1GiB"}, "memroy"),
    ({"memory": "56 gigabytes"}, "/memory"),
    ({"replicas": 0}, "/replicas"),
    ({"extraArgs": ["drive-endurance=600TB"]}, "/extraArgs"),
    ({"drain": {"deadlineSeconds": 300}}, "more than twice drain.deadlineSeconds"),
    ({"tls": {"secretName": ""}}, "tls.insecure=true"),
    ({"checkpoints": {"onDrain": True}}, "checkpoints.existingClaim is empty"),
]


def render(path, values, release="longshore"):
    with Chart.load(path) as chart:
        chart.validate_schema(values)
        made = chart.render(values, name=release, namespace="default")
    notes = [text for name, text in made.items() if name.endswith("NOTES.txt")]
    documents = [text for name, text in made.items() if name.endswith(".yaml") and text.strip()]
    return [document for text in documents for document in yaml.safe_load_all(text)], notes[0]


def by_name(documents):
    return {(document["kind"], document["metadata"]["name"]): document for document in documents}


def without_helms_labels(document):
    """Removes all labels but `app`: Helm alone labels an object with its creator."""
    document = copy.deepcopy(document)
    labels = document["metadata"].get("labels", {})
    document["metadata"]["labels"] = {key: value for key, value in labels.items() if key == "app"}
    return document


def check_objects(documents):
    for document in documents:
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)


def check_paths(server):
    """Checks that each path in the flags is mounted, and that each mount has a volume."""
    pod = server["spec"]["template"]["spec"]
    [container] = pod["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    for flag in container["args"]:
        value = flag.partition("=")[2]
        assert not value.startswith("/") or value in mounts, f"{flag} names no mount of {mounts}"
    volumes = {volume["name"] for volume in pod["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in server["spec"]["volumeClaimTemplates"]}
    assert set(mounts.values()) == volumes, f"{mounts} but {volumes}"
    ports = {port["name"] for port in container["ports"]}
    for probe in ["startupProbe", "livenessProbe", "readinessProbe"]:
        assert container[probe]["httpGet"]["port"] in ports, probe
        scheme = container[probe]["httpGet"].get("scheme", "HTTP")
        assert (scheme == "HTTPS") == ("--http-tls" in container["args"]), f"{probe} asks by {scheme}"
    assert "lifecycle" not in container, "a hook before SIGTERM, which would then break off the drain that the hook began"
    return container["args"]


def main(path, manifest):
    for values in CASES.values():
        report = lint(path, values, strict=True)
        found = [message for message in report["messages"] if message["severity"] > 1]
        assert not found and not report["errors"], f"{found} {report['errors']}"

    plain = list(yaml.safe_load_all(pathlib.Path(manifest).read_text()))
    check_objects(plain)
    for case, values in CASES.items():
        documents, notes = render(path, values)
        check_objects(documents)
        made = by_name(documents)
        policy = made.get(("NetworkPolicy", "longshore"))
        if policy:
            [servers] = [rule["from"] for rule in policy["spec"]["ingress"] if "from" in rule]
            assert {"podSelector": made["StatefulSet", "longshore"]["spec"]["selector"]} in servers, f"servers fetch no shards: {policy}"
        if case == "the defaults":
            expected = {key: without_helms_labels(document) for key, document in by_name(plain).items()}
            found = {key: without_helms_labels(document) for key, document in made.items()}
            assert found.keys() == expected.keys(), f"{found.keys()} but {expected.keys()}"
            for key in expected:
                assert found[key] == expected[key], f"{key}: the chart says\n{json.dumps(found[key])}\nand the manifest\n{json.dumps(expected[key])}"
        elif case == "everything":
            assert "longshore-2.longshore.default:7070" in notes and "not encrypted" not in notes, notes
        elif case == "not encrypted":
            assert "not encrypted" in notes, notes
        else:
            assert not any(kind == "NetworkPolicy" for kind, _ in made), made.keys()
        print(json.dumps(check_paths(made["StatefulSet", "longshore"])))

    for values, words in REFUSED:
        try:
            render(path, values)
        except helm_python.HelmError as error:
            assert words in str(error), f"{values}: {error}"
        else:
            raise AssertionError(f"{values} was taken")
    print("ok")


main(*sys.argv[1:])
