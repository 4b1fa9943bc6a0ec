{{- define "chitu.name" -}}
{{ ternary .Release.Name (printf "%s-chitu" .Release.Name) (contains "chitu" .Release.Name) | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "chitu.selector" -}}
app.kubernetes.io/name: chitu
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "chitu.labels" -}}
{{ include "chitu.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "chitu.secret" -}}
{{ .Values.secret.existing | default (include "chitu.name" .) }}
{{- end }}

{{/* Seconds from SIGTERM to SIGKILL: above all that a drain may take. */}}
{{- define "chitu.grace" -}}
{{ add .Values.drain.delaySeconds .Values.drain.seconds 5 }}
{{- end }}

{{/* Settings of all launchers of routers and groups, one argument a line. */}}
{{- define "chitu.settings" -}}
- --log-dir=-
- dp_config.probe_port={{ .Values.probes.port }}
- dp_config.router.pd_disaggregation.deadlines.drain_delay_s={{ .Values.drain.delaySeconds }}
- dp_config.router.pd_disaggregation.deadlines.drain_s={{ .Values.drain.seconds }}
{{- if .Values.model.servedName }}
- {{ printf "model.served_name=%s" .Values.model.servedName | quote }}
{{- end }}
{{- if .Values.keda.enabled }}
- dp_config.router.balance=advise
{{- end }}
{{- range .Values.settings }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{/* What pods of all roles have: (dict "root" $ "gpus" N "resources" {} "nodeSelector" {}). */}}
{{- define "chitu.pod" -}}
automountServiceAccountToken: false
terminationGracePeriodSeconds: {{ include "chitu.grace" .root }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .root.Values.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
volumes:
  - {name: tmp, emptyDir: {}}
  - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .root.Values.sharedMemory }}}}
  - {name: cache, emptyDir: {sizeLimit: {{ .root.Values.cacheSize }}}}
  {{- with .root.Values.model.claim }}
  - {name: models, persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}}
  {{- end }}
  {{- with .root.Values.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "chitu.container" -}}
image: {{ printf "%s:%s" .root.Values.image.repository (toString .root.Values.image.tag) | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  readOnlyRootFilesystem: true
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
env:
  - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
  {{- if .isRouter }}
  - {name: POD_INDEX, valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}}
  {{- end }}
  - {name: CHITU_CLUSTER_KEY, valueFrom: {secretKeyRef: {name: {{ include "chitu.secret" .root }}, key: cluster-key}}}
  - {name: CHITU_API_KEYS, valueFrom: {secretKeyRef: {name: {{ include "chitu.secret" .root }}, key: api-keys, optional: true}}}
  {{- with .root.Values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- $resources := deepCopy (.resources | default dict) }}
{{- if .gpus }}
{{- $_ := set $resources "limits" (merge (dict "nvidia.com/gpu" (int .gpus)) ($resources.limits | default dict)) }}
{{- end }}
{{- with $resources }}
resources: {{ toJson . }}
{{- end }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  - {name: shm, mountPath: /dev/shm}
  - {name: cache, mountPath: /cache}
  {{- if .root.Values.model.claim }}
  - {name: models, mountPath: /models, readOnly: true}
  {{- end }}
  {{- with .root.Values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* A launcher that starts may take long before its processes are up; it answers /livez from its first second. */}}
{{- define "chitu.launcherProbes" -}}
startupProbe:
  httpGet: {path: /livez, port: probes}
  periodSeconds: 2
  failureThreshold: {{ div .Values.probes.startSeconds 2 }}
livenessProbe: {httpGet: {path: /livez, port: probes}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 6}
readinessProbe: {httpGet: {path: /readyz, port: probes}, periodSeconds: 2, timeoutSeconds: 2}
{{- end }}
