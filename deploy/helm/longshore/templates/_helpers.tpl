{{/* All objects of a release have its name, which is also the first part of each server's. */}}
{{- define "longshore.name" -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{/* What selects the servers. It never changes, since a StatefulSet's selector cannot. */}}
{{- define "longshore.selector" -}}
app: {{ include "longshore.name" . }}
{{- end -}}

{{- define "longshore.labels" -}}
{{ include "longshore.selector" . }}
app.kubernetes.io/name: longshore
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* The addresses that workers dial, in the order that every rank must name them in. */}}
{{- define "longshore.servers" -}}
{{- $name := include "longshore.name" . -}}
{{- $servers := list -}}
{{- range $index := until (int .Values.replicas) -}}
{{- $servers = append $servers (printf "%s-%d.%s.%s:7070" $name $index $name $.Release.Namespace) -}}
{{- end -}}
{{- join "," $servers -}}
{{- end -}}
