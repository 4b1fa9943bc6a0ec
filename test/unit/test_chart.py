"""`deploy/helm`, by Helm's own library and against Kubernetes' published schemas; its commands, by our own parser."""

from __future__ import annotations

import base64
import copy
import json
import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import yaml
from support.helm_chart import CHART, RELEASE, helm, rendered

from chitu.cli.arguments import make_parser
from chitu.config.load import load_topology
from chitu.config.topology import router_hosts

Manifest = dict[str, Any]
KUBERNETES = ("1.31", "1.37")
EVERYTHING: dict[str, Any] = {
    "image": {"repository": "registry.example/chitu", "tag": "1", "pullSecrets": [{"name": "registry"}]},
    "model": {"path": "/models/big", "claim": "models", "servedName": "big"},
    "settings": ["scheduler.max_batched_tokens=8192", 'dp_config.router.slo={"ttft_s": 2}'],
    "secret": {"clusterKey": "0123456789abcdef", "apiKeys": ["one", "two"]},
    "router": {"replicas": 2, "resources": {"requests": {"cpu": 2}}, "service": {"annotations": {"a": "b"}}},
    "roles": {
        "prefill": {"replicas": 2, "gpus": 2, "resources": {"limits": {"memory": "64Gi"}}},
        "decode": {"replicas": 3, "gpus": 1, "surge": 0, "nodeSelector": {"gpu": "H200"}},
        "encode": {"replicas": 1},
        "unified": {"replicas": 1},
    },
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "podAnnotations": {"k8s.v1.cni.cncf.io/networks": "rdma"},
    "extraEnv": [{"name": "NCCL_DEBUG", "value": "WARN"}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "keda": {"enabled": True, "authenticationRef": "prometheus"},
    "networkPolicy": {"clients": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}]},
}
TEXT = "model: {path: ''}\ndp_config: {router: {host: NODE_0, prefill_schedulers: [{host: NODE_1}]}}\n"
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "everything": EVERYTHING,
    "groups": {"groups": {"enabled": True, "gpus": 8}},
    "groups of a text": {**EVERYTHING, "groups": {"enabled": True, "topology": TEXT}},
    "existing secret": {"secret": {"existing": "mine"}, "serviceMonitor": {"enabled": True}},
}
ALL = pytest.mark.parametrize("values", list(CASES.values()), ids=list(CASES))
FIELDS = {"POD_IP": "10.0.0.9", "POD_INDEX": "1", "LWS_WORKER_INDEX": "1"}
OBJECT = {"type": "object"}
TEXT_MAP = {"type": "object", "additionalProperties": {"type": "string"}}


def closed(required: tuple[str, ...] = (), **properties: Any) -> Manifest:
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": list(required)}


NUMBER, WORD = {"type": "integer"}, {"type": "string"}
CUSTOM = {
    "ScaledObject": closed(
        ("scaleTargetRef", "triggers"),
        scaleTargetRef=closed(("name",), name=WORD, apiVersion=WORD, kind=WORD),
        minReplicaCount=NUMBER,
        maxReplicaCount=NUMBER,
        pollingInterval=NUMBER,
        advanced=closed(horizontalPodAutoscalerConfig=closed(behavior=OBJECT)),
        triggers={
            "type": "array",
            "items": closed(
                ("type", "metadata"),
                type=WORD,
                metadata=TEXT_MAP,
                metricType={"enum": ["AverageValue", "Value", "Utilization"]},
                authenticationRef=closed(("name",), name=WORD),
            ),
        },
    ),
    "ServiceMonitor": closed(
        ("selector", "endpoints"),
        selector=closed(matchLabels=TEXT_MAP),
        endpoints={
            "type": "array",
            "items": closed(
                port=WORD,
                path=WORD,
                interval={"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
                authorization=closed(
                    type=WORD,
                    credentials=closed(("key",), name=WORD, key=WORD, optional={"type": "boolean"}),
                ),
            ),
        },
    ),
    "LeaderWorkerSet": closed(
        ("leaderWorkerTemplate",),
        replicas=NUMBER,
        rolloutStrategy=closed(
            ("type",),
            type={"enum": ["RollingUpdate"]},
            rollingUpdateConfiguration=closed(maxUnavailable=NUMBER, maxSurge=NUMBER),
        ),
        leaderWorkerTemplate=closed(
            ("workerTemplate",),
            size=NUMBER,
            restartPolicy={"enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
            workerTemplate=OBJECT,
        ),
    ),
}
"""Fields that the chart uses of kinds that Kubernetes itself does not have, with their types as KEDA, the Prometheus
operator and LeaderWorkerSet publish them. Parts that are Kubernetes' own are checked by its schemas."""


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [one for one in manifests if one["kind"] in kinds]


def templates(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Yield the pod templates, by the names of their workloads."""
    for one in manifests:
        if one["kind"] == "LeaderWorkerSet":
            yield one["metadata"]["name"], one["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        elif "template" in one.get("spec", {}):
            yield one["metadata"]["name"], one["spec"]["template"]


def check(one: Manifest, version: str) -> None:
    """Raise ValidationError for a manifest that Kubernetes would refuse, or whose fields it would drop."""
    import jsonschema
    import kubernetes_validate

    if one["kind"] not in CUSTOM:
        kubernetes_validate.validate(one, version, strict=True)
        return
    assert {*one} == {"apiVersion", "kind", "metadata", "spec"}
    jsonschema.validate(one["spec"], CUSTOM[one["kind"]])
    for name, template in templates([one]):
        within = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": template}
        kubernetes_validate.validate(within, version, strict=True)
    if behavior := one["spec"].get("advanced", {}).get("horizontalPodAutoscalerConfig", {}).get("behavior"):
        spec = {"maxReplicas": 1, "scaleTargetRef": {"kind": "Deployment", "name": "d"}, "behavior": behavior}
        scaler = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "spec": spec}
        kubernetes_validate.validate({**scaler, "metadata": {"name": "s"}}, version, strict=True)


@ALL
def test_helm_has_nothing_to_say_about_it(values: Manifest) -> None:
    report = helm().lint(CHART, values, strict=True)
    assert not report["errors"] and all(said["severity"] < 2 for said in report["messages"]), report


@ALL
def test_kubernetes_takes_every_manifest(values: Manifest) -> None:
    for one, version in product(rendered(**values), KUBERNETES):
        check(one, version)


def test_a_field_that_does_not_exist_is_found_in_each_kind() -> None:
    import jsonschema

    seen = set()
    for one in [*rendered(**EVERYTHING), *rendered(**CASES["groups of a text"])]:
        wrong = copy.deepcopy(one)
        wrong["spec" if "spec" in one else "metadata"]["replicaCount"] = 2
        with pytest.raises(jsonschema.ValidationError):
            check(wrong, KUBERNETES[-1])
        seen.add(one["kind"])
    assert {*CUSTOM, "Deployment", "StatefulSet", "NetworkPolicy", "PodDisruptionBudget", "ConfigMap"} <= seen
    for _, template in templates(rendered()):
        template["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(jsonschema.ValidationError):
        for one in of_kind(manifests := rendered(), "Deployment"):
            one["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
            check(one, KUBERNETES[-1])
    assert manifests


def test_values_that_the_chart_does_not_have_are_refused() -> None:
    for wrong in ({"routers": {}}, {"roles": {"prefil": {"replicas": 1}}}, {"drain": {"seconds": "a lot"}}):
        with pytest.raises(helm().HelmError):
            rendered(**wrong)


def matches(selector: Manifest, template: Manifest) -> bool:
    return selector["matchLabels"].items() <= template["metadata"]["labels"].items()


def ports_of(template: Manifest) -> dict[str, int]:
    (container,) = template["spec"]["containers"]
    return {port["name"]: port["containerPort"] for port in container["ports"]}


@ALL
def test_what_refers_to_something_finds_it(values: Manifest) -> None:
    manifests = rendered(**values)
    pods = dict(templates(manifests))
    for one in of_kind(manifests, "Deployment", "StatefulSet"):
        found = [name for name, template in pods.items() if matches(one["spec"]["selector"], template)]
        assert found == [one["metadata"]["name"]]
    for one in of_kind(manifests, "PodDisruptionBudget"):
        assert len([name for name, pod in pods.items() if matches(one["spec"]["selector"], pod)]) == 1
    for one in of_kind(manifests, "NetworkPolicy"):
        assert all(matches(one["spec"]["podSelector"], pod) for pod in pods.values())
        assert all(matches(one["spec"]["ingress"][0]["from"][0]["podSelector"], pod) for pod in pods.values())
    for one in of_kind(manifests, "ScaledObject"):
        (target,) = (each for each in of_kind(manifests, "Deployment") if each["metadata"] == {**one["metadata"]})
        assert one["spec"]["scaleTargetRef"]["name"] == target["metadata"]["name"]
        assert "replicas" not in target["spec"]  # an upgrade would take back what KEDA has set
    services = {one["metadata"]["name"]: one for one in of_kind(manifests, "Service")}
    for one in services.values():
        selector = {name: word for name, word in one["spec"]["selector"].items() if "worker-index" not in name}
        (pod,) = (pod for pod in pods.values() if selector.items() <= pod["metadata"]["labels"].items())
        assert {port["targetPort"] for port in one["spec"]["ports"]} <= {*ports_of(pod)}
    for one in of_kind(manifests, "ServiceMonitor"):
        found = [each for each in services.values() if matches(one["spec"]["selector"], {"metadata": each["metadata"]})]
        assert len(found) == 1 and {"name": "api"}.items() <= found[0]["spec"]["ports"][0].items()
    for one in of_kind(manifests, "StatefulSet"):
        assert one["spec"]["serviceName"] in services
    secrets = {one["metadata"]["name"]: one["data"] for one in of_kind(manifests, "Secret")}
    for pod in pods.values():
        for entry in pod["spec"]["containers"][0]["env"]:
            if source := entry.get("valueFrom", {}).get("secretKeyRef"):
                known = secrets.get(source["name"], {})
                assert source["name"] == "mine" or source.get("optional") or source["key"] in known


@ALL
def test_no_pod_is_root_or_writes_to_its_image(values: Manifest) -> None:
    for _, template in templates(rendered(**values)):
        spec, (container,) = template["spec"], template["spec"]["containers"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 10001
        assert container["securityContext"]["readOnlyRootFilesystem"]
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert {"/tmp", "/dev/shm", "/cache"} <= {*mounts}  # what the image writes to
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
        assert all(mounts[path].get("readOnly") for path in ("/models", "/etc/chitu") if path in mounts)


@ALL
def test_a_pod_has_more_grace_than_its_drain_takes(values: Manifest) -> None:
    for _, template in templates(rendered(**values, drain={"delaySeconds": 7, "seconds": 40})):
        (container,) = template["spec"]["containers"]
        words = " ".join([*container["command"], *container["args"]])
        seconds = [float(found) for found in re.findall(r"deadlines\.drain\w*_s=(\d+)", words)]
        assert template["spec"]["terminationGracePeriodSeconds"] == 52 > sum(seconds) + 0.5
        assert sorted(seconds) == [7.0, 40.0] or "join" in container["command"]  # these get them from the router
        if "join" in container["command"]:
            assert container["lifecycle"]["preStop"]["exec"]["command"] == ["chitu", "drain", "--self", "--force"]


@ALL
def test_its_commands_are_ours_and_its_probes_are_at_ports_that_answer_them(values: Manifest) -> None:
    for name, template in templates(rendered(**values)):
        (container,) = template["spec"]["containers"]
        words = [
            re.sub(r"\$\((\w+)\)", lambda found: FIELDS[found[1]], word)
            for word in (*container["command"], *container["args"])
        ]
        assert words.pop(0) == "chitu"
        options, rest = make_parser()[0].parse_known_args(words)
        ports = ports_of(template)
        settings = [word for word in words if re.match(r"[a-z_]+(\.\w+)+=", word)]
        assert {*rest} <= {*settings}
        packaged = next((word for word in words if word in ("router_alone", "pd_disagg_1p1d_multi_node")), None)
        topology = load_topology(packaged or "router_alone", settings)
        assert topology.dp_config.probe_port == ports["probes"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container[probe]["httpGet"]
            assert (asked["port"], asked["path"]) in product(["api"], ["/livez", "/health"]) or (
                asked["port"],
                asked["path"],
            ) in product(["probes"], ["/livez", "/readyz"])
        if name.endswith("router"):
            assert topology.dp_config.router.port == ports["api"]
            hosts = router_hosts(topology.dp_config.router)
            first = f"{RELEASE}-chitu-router-0.{RELEASE}-chitu-routers.llm.svc.cluster.local"
            assert len(hosts) == values.get("router", {}).get("replicas", 1) and (len(hosts) == 1 or hosts[0] == first)
        gpus = container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0)
        if options.command == "join":
            assert options.devices == ",".join(map(str, range(gpus))) if gpus else options.devices is None


def test_the_text_of_a_topology_is_a_file_in_the_pod() -> None:
    (file,) = of_kind(rendered(groups={"enabled": True, "topology": TEXT}), "ConfigMap")
    assert file["data"] == {"topology.yaml": TEXT}
    ((_, template),) = templates(rendered(groups={"enabled": True, "topology": TEXT}))
    assert template["spec"]["containers"][0]["command"] == ["chitu", "node", "/etc/chitu/topology.yaml"]


def test_a_group_has_its_own_name_for_the_service_that_its_controller_makes() -> None:
    """A Service of that name with an address of its own would leave the pods without names."""
    manifests = rendered(**CASES["groups"])
    (group,) = of_kind(manifests, "LeaderWorkerSet")
    assert group["metadata"]["name"] not in {one["metadata"]["name"] for one in of_kind(manifests, "Service")}


def test_a_key_is_made_only_if_none_is_given() -> None:
    (given,) = of_kind(rendered(secret={"clusterKey": "k" * 16, "apiKeys": ["a", "b"]}), "Secret")
    known = {name: base64.b64decode(word).decode() for name, word in given["data"].items()}
    assert known == {"cluster-key": "k" * 16, "api-keys": "a,b", "metrics-key": "a"}
    (made,) = of_kind(rendered(), "Secret")
    assert len(base64.b64decode(made["data"]["cluster-key"])) == 48 and {*made["data"]} == {"cluster-key"}
    assert not of_kind(rendered(secret={"existing": "mine"}), "Secret")


def test_a_role_without_a_spare_gpu_ends_a_pod_before_it_starts_one() -> None:
    manifests = rendered(roles={"decode": {"surge": 0}, "prefill": {"replicas": 0}})
    (decode,) = of_kind(manifests, "Deployment")
    assert decode["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_the_values_are_explained_by_their_schema_alone() -> None:
    """Each value of the file is one that the schema knows, and the reverse."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert {*values} == {*schema["properties"]} and schema["additionalProperties"] is False


def test_the_commands_of_the_document_set_values_that_there_are() -> None:
    text = (CHART.parents[2] / "docs" / "kubernetes.md").read_text()
    values: dict[str, Any] = {}
    words = [word for group in re.findall(r"--set (\S+)", text) for word in group.split(",")]
    for path, _, word in (each.partition("=") for each in words):
        *parents, name = path.split(".")
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = int(word) if word.isdigit() else word
    assert len(words) > 5 and rendered(**values)
    named = set(
        re.findall(r"`(?:[\w.]+ )?((?:roles|router|drain|groups|keda|secret|networkPolicy|serviceMonitor)\.\w+)", text)
    )
    known = yaml.safe_load((CHART / "values.yaml").read_text())
    assert len(named) > 5 and all(name in known[group] for group, name in (one.split(".") for one in named))
